"""Tasks that take pictures: labels, vectors, boxes and maps."""
