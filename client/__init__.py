"""Callers of a running server: a command line, the parity check over the wire, and the load measurement."""
