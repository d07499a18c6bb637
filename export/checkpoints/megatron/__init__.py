"""Megatron-DeepSpeed's GPT-2: tensor and pipeline parallel parts joined to the model that transformers knows."""
