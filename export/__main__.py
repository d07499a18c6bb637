"""`python -m export`: the command line."""

from . import interruption
from .commands import standard_streams

if __name__ == "__main__":
    standard_streams.prepare()
    # Loading the rest takes a while, of which nobody wants a traceback.
    interruption.leave_at_once()

import argparse
import gc
import sys
from collections.abc import Sequence

from .commands import (
    activate,
    consolidate,
    inspect_checkpoint,
    lint,
    promote,
    prune,
    remove,
    run,
    tune,
    verb,
    verify_repository,
    versions,
)
from .commands.parser import Parser
from .locations import PROGRAM

# In the order of a checkpoint's life.
_VERBS = (
    inspect_checkpoint,
    consolidate,
    run,
    versions,
    activate,
    promote,
    prune,
    remove,
    verify_repository,
    tune,
    lint,
)


# How many objects may come before the collector looks at the youngest, and how often it looks at older ones then.
# torch's exporter makes millions that live until its end: with Python's own thresholds a sixth of the CPU time of an
# export goes into looking at them again and again, and the most memory in use is the same.
_GC_THRESHOLDS = (100_000, 50, 1000)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    gc.set_threshold(*_GC_THRESHOLDS)
    parser = Parser(prog=PROGRAM, description="From a trained checkpoint to a verified version in a Triton repository.")
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    for module in _VERBS:
        module.add_parser(verbs)
    return verb.carry_out(lambda: _carry_out(parser, argv))


def _carry_out(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> int:
    arguments = parser.parse_args(argv)
    verb.check_folder()
    code: int = arguments.run(arguments)
    return code


if __name__ == "__main__":
    sys.exit(main())
