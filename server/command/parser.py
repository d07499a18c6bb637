"""The command line of the server, whose help is an answer like any other."""

import argparse
from typing import Any

from .ending import answer


class Parser(argparse.ArgumentParser):
    """Has it told where nothing takes the help, which argparse lets pass."""

    def print_help(self, file: Any = None) -> None:
        """Print the help; always on standard output, where argparse prints it for `--help`."""
        answer(self.format_help(), end="")
