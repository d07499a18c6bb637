"""A checkpoint's weights as a Hugging Face folder, copied without being interpreted."""
