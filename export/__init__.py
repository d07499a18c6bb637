"""Checkpoint in, verified Triton model version out. Run as `python -m export`."""
