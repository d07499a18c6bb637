"""FSDP's folders: `torch.distributed.checkpoint`, full and per-rank saves."""
