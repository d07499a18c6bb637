"""The verbs of the command line: their options, and what they print."""
