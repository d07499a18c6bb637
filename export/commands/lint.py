"""The verb `lint`: what is wrong with a model repository, without a server or a GPU. Needs no torch."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..locations import REPOSITORY
from ..targets import DEFAULT_TARGET, find_target
from .standard_streams import write_answer
from .verb import Verbs, add_verb

_MORE = """\
One sentence a finding: the file, the line, what is wrong, what to write instead. An error is what the target does not
load, a warning what it loads and does otherwise than was probably meant. A comment `# modelyard: ignore=RULE` in a
model's config.pbtxt switches a rule off for that model. Errors make the exit code 1, with --strict warnings too."""


def add_parser(verbs: Verbs[argparse.ArgumentParser]) -> None:
    """Add the verb to the command line."""
    parser = add_verb(
        verbs,
        "lint",
        run,
        help="say what is wrong with a model repository, without a server",
        description="Say what is wrong with a Triton model repository, whoever wrote it. Reads files and runs nothing.",
        examples=("./models", "./models --target 25.03 --strict", "./models --format github"),
        succeeded="no errors found",
        more=_MORE,
    )
    parser.add_argument(
        "repository",
        type=Path,
        nargs="?",
        default=REPOSITORY,
        help="what tritonserver gets as --model-repository (default: %(default)s)",
    )
    parser.add_argument(
        "--target",
        default=DEFAULT_TARGET.release,
        metavar="YY.MM",
        help="Triton release that is to load it (default: %(default)s)",
    )
    written = parser.add_mutually_exclusive_group()
    written.add_argument(
        "--format", choices=("text", "json", "github"), default="text", help="how findings are written (default: text)"
    )
    written.add_argument("--json", dest="format", action="store_const", const="json", help="the same as --format json")
    parser.add_argument("--strict", action="store_true", help="have warnings end it with exit code 1 as well")


def run(args: argparse.Namespace) -> int:
    """Run the verb, write what was found, and return 1 where there are errors.

    Raises:
        TargetError: There is no such release.
        RepositoryError: There is no such repository, or nothing in it.
    """
    # Protobuf and gRPC take most of a second to import, which no other verb's start shall wait for.
    from ..lint.finding import Level
    from ..lint.linter import lint
    from ..lint.report import FORMATS

    found = lint(args.repository, find_target(args.target))
    write_answer(FORMATS[args.format](found, args.repository))
    refused = {Level.ERROR, Level.WARNING} if args.strict else {Level.ERROR}
    return 1 if any(each.level in refused for each in found) else 0
