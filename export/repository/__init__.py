"""The Triton model repository: versions, configurations, and what records where they came from."""
