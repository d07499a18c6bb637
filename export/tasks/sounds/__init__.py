"""Tasks that take sounds."""
