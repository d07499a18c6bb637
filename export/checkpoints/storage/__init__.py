"""Bytes on disk as tensors: ranges, blocks, checksums and dtypes, whatever the format above them."""
