"""What stands around every command: the process that it finds, and how it ends."""
