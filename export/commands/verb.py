"""What every verb has: a place on the command line with examples, and an end as a sentence and an exit code."""

import argparse
import errno
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType

from rich.console import Console

from .. import interruption
from ..errors import ExportError, ServingError, SettingsError, UnansweredError, escape_controls
from ..file_limit import advise, is_full
from ..locations import REPOSITORY, name_command
from ..repository.use import is_served
from .standard_streams import drop_answer, write_answer

Verbs = argparse._SubParsersAction  # what `add_subparsers` returns, which has no public name

# What was done in the repository was done, and a server that was waited for does not serve it.
EXIT_NOT_SERVED = 3
# What was asked for was done, and its answer could not be written.
EXIT_UNANSWERED = 5

# What the table of a proof of text generation fits in, whose bounds have the longest names.
_LOG_COLUMNS = 140

# Carries a verb out, and returns its exit code.
Run = Callable[[argparse.Namespace], int]


def add_verb(
    verbs: "Verbs[argparse.ArgumentParser]",
    name: str,
    run: Run,
    *,
    help: str,  # noqa: A002 -- argparse's own word
    description: str,
    examples: Sequence[str],
    succeeded: str,
    more: str = "",
    codes: str = "1 refused (one sentence on stderr, nothing written), 2 wrong usage",
) -> argparse.ArgumentParser:
    """Add a verb to the command line and return its parser.

    Args:
        verbs: Where it is added.
        name: The word that is typed.
        run: Function that carries it out.
        help: One line for the list of verbs.
        description: The same at the head of its own help.
        examples: What is typed behind the verb, one example each.
        succeeded: What exit code 0 says.
        more: What its own help says in front of the examples.
        codes: What its other exit codes say.
    """
    lines = [f"  {name_command(name)} {example}" for example in examples]
    codes = f"exit codes: 0 {succeeded}, {codes}, {EXIT_UNANSWERED} done, but the answer cannot be written"
    parser: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=help,
        description=description,
        epilog="\n".join([*([more, ""] if more else []), "examples:", *lines, "", codes]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def add_repository(parser: argparse.ArgumentParser) -> None:
    """Add the options that every verb on a repository has."""
    parser.add_argument(
        "--repository",
        type=Path,
        default=REPOSITORY,
        metavar="DIR",
        help="Triton model repository (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object on stdout")


def open_console() -> Console:
    """Return where a verb tells how far it is: stderr, as wide as the terminal, and wide enough for tables in a log."""
    console = Console(stderr=True)
    # Of what has no width rich thinks that it has 80 columns.
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _LOG_COLUMNS
    return console


def answer(arguments: argparse.Namespace, content: object, lines: Iterable[str], done: str = "") -> None:
    """Write what a verb found: JSON for programs, or lines of text, in which nothing obeys a terminal.

    Args:
        arguments: Those of the verb.
        content: What becomes JSON.
        lines: What becomes text.
        done: What the verb has done, which is told where the answer cannot be.

    Raises:
        UnansweredError: Nothing takes the answer.
    """
    text = [json.dumps(content, indent=2)] if arguments.json else [escape_controls(line) for line in lines]
    write_answer("".join(line + "\n" for line in text), done)


def say(sentence: str) -> None:
    """Write a line beside the answer."""
    sys.stderr.write(escape_controls(sentence) + "\n")


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of cells as lines in which the cells stand below one another."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def count(number: int, noun: str) -> str:
    """Return a number with its noun."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def carry_out(run: Callable[[], int]) -> int:
    """Carry a verb out; return its exit code, and tell in one sentence why it has done nothing if it has not."""
    console = open_console()
    try:
        interruption.raise_again()
        signal.signal(signal.SIGTERM, _interrupt)
        return run()
    except ServingError as exc:
        _refuse(console, str(exc))
        return EXIT_NOT_SERVED
    except UnansweredError as exc:
        drop_answer()
        _refuse(console, str(exc))
        return EXIT_UNANSWERED
    except ExportError as exc:
        return _refuse(console, str(exc))
    except KeyboardInterrupt:
        console.print("error: interrupted; everything is as it was.", style="red", soft_wrap=True)
        return 130
    except BrokenPipeError:
        # The reader of the answer, perhaps `head`, went away; the work is done. The exit code is a shell's for that.
        drop_answer()
        return 128 + signal.SIGPIPE
    # What no reader foresaw: rights taken away, a disk that fails or is full. A bug of our own is not an OSError.
    except OSError as exc:
        return _refuse(console, str(_explain(exc)))


def _refuse(console: Console, sentence: str) -> int:
    console.print(f"error: {sentence}", style="red", markup=False, highlight=False, soft_wrap=True)
    return 1


def _explain(exc: OSError) -> ExportError:
    """Return a refusal of the operating system's as one of ours."""
    at, got = f" at {exc.filename}" if exc.filename else "", exc.strerror or str(exc)
    if advice := advise(exc):
        expected, remedy = advice
        return ExportError(f"a file{at} cannot be written", expected=expected, got=got, remedy=remedy)
    if is_full(exc):
        remedy = "make room there, or name a folder that has it in TMPDIR if this is the one for temporary files"
        return ExportError(f"a file{at} cannot be written", expected="room for it", got=got, remedy=remedy)
    if exc.errno in (errno.EACCES, errno.EPERM):
        remedy = "let this user read and write it, and enter the folders that it is in"
        return ExportError(f"a file{at} cannot be used", expected="the right to it", got=got, remedy=remedy)
    return ExportError(f"{exc.filename}: {got}" if exc.filename else got)


def check_folder() -> None:
    """Refuse a working folder that was removed: libraries end the process in words of their own over it.

    Raises:
        SettingsError: It was.
    """
    try:
        Path.cwd()
    except OSError as exc:
        raise SettingsError(
            "the working folder cannot be used",
            expected="one that is there",
            got=f"'{exc.strerror}'",
            remedy="change into another one",
        ) from exc


def _interrupt(signal_number: int, frame: FrameType | None) -> None:
    # The same way out as Ctrl-C, so that what was begun is undone.
    raise KeyboardInterrupt


def choose_next(repository: Path, new: Path | None) -> str:
    """Return the verb that is of use once a version is active: a server may follow the repository.

    Args:
        repository: Where it is published.
        new: Its folder, if it has just come.
    """
    return "check" if is_served(repository, new) else "serve"
