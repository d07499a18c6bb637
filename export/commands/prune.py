"""The verb `prune`: old versions out of the repository."""

import argparse
from dataclasses import asdict

from ..repository.contents import list_models
from ..repository.retirement import Removed, prune
from .verb import Verbs, add_repository, add_verb, answer

_EXAMPLES = (
    "tickets --keep 3 --repository /srv/models",
    "--keep 2 --repository /srv/models",
    "--keep 2 --repository /srv/models --json",
)


def add_parser(verbs: "Verbs[argparse.ArgumentParser]") -> None:
    """Add the verb to the command line."""
    parser = add_verb(
        verbs,
        "prune",
        run,
        help="remove old versions; never the active one, nor one that is served",
        description=(
            "Remove all but the newest versions. The active one stays, and so does one that a server on this machine "
            "still serves."
        ),
        examples=_EXAMPLES,
        succeeded="done",
        codes="1 refused (one sentence on stderr) or some of the files stay, 2 wrong usage",
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="name that clients use (default: every model)")
    parser.add_argument("--keep", required=True, type=_read_count, metavar="K", help="how many of the newest stay")
    add_repository(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the verb. Raises what `prune` raises."""
    names = [arguments.name] if arguments.name else list_models(arguments.repository)
    done = [prune(arguments.repository, name, keep=arguments.keep) for name in names]
    told = "old versions are removed" if any(each.versions for each in done) else ""
    content = {"models": [asdict(each) for each in done]}
    answer(arguments, content, [describe(each) for each in done] or ["no models"], told)
    return 0


def describe(removed: Removed) -> str:
    """Return in a line what was removed, and what stays."""
    # Files that another version shares stay.
    freed = f"{removed.freed_bytes / 1e6:.1f} MB freed"
    gone = f"removed {_list(removed.versions)}, {freed}" if removed.versions else "removed nothing"
    in_use = f", {_list(removed.in_use)} only because a server still serves it" if removed.in_use else ""
    return f"{removed.name}: {gone}; kept {_list(removed.kept) if removed.kept else 'nothing'}{in_use}"


def _list(versions: tuple[int, ...]) -> str:
    return f"version{'s' if len(versions) > 1 else ''} {', '.join(map(str, versions))}"


def _read_count(text: str) -> int:
    if not text.isascii() or not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of versions; write 0, 1, 2 ...")
    return int(text)
