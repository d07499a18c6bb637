"""The command line of the client, whose help is an answer like any other."""

from typing import Any

from modelyard.parser import VerbParser

from .ending import answer


class Parser(VerbParser):
    """Has the help told where nothing takes it, which argparse lets pass."""

    def print_help(self, file: Any = None) -> None:
        """Print the help; always on standard output, where argparse prints it for `--help`."""
        answer(self.format_help(), end="", flush=True)
