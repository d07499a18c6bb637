"""What is wrong with a model repository, told without a server: any Triton repository, ours or not. Needs no torch."""
