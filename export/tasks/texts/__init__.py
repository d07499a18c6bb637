"""Tasks that take texts: labels, places, vectors, and texts that go on."""
