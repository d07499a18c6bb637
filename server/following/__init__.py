"""What a repository publishes, what of it is served, and how a running server gets from one to the other."""
