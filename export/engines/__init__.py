"""What runs a published graph."""
