"""What runs a published graph: one file an engine, and `table.py`, which names them all."""
