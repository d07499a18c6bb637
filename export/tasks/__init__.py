"""What a checkpoint is served as: the table of tasks, and a class for each."""
