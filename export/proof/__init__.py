"""Whether what will be served gives the checkpoint's own answers."""
