"""DeepSpeed's folders: ZeRO stages, without ZeRO, and universal checkpoints."""
