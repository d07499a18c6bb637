"""Formats of a whole model: Hugging Face folders and single files by `torch.save`."""
