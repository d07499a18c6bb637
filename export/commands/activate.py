"""The verb `activate`: which version servers serve, back and forth."""

import argparse
from dataclasses import asdict
from functools import partial

from ..locations import name_command
from ..repository.activation import activate
from ..repository.version import Version, find_version
from .verb import EXIT_NOT_SERVED, Verbs, add_repository, add_verb, answer, open_console
from .waiting import check_status_address, wait_until_served

# So much takes a second or more to hash, which is worth a word.
_SLOW_BYTES = 500_000_000

_EXAMPLES = (
    "tickets 3 --repository /srv/models",
    "tickets --repository /srv/models",
    "tickets 2 --repository /srv/models --wait localhost:8003",
    "tickets 2 --repository /srv/models --wait a.example:8003 b.example:8003 --json",
)


def add_parser(verbs: "Verbs[argparse.ArgumentParser]") -> None:
    """Add the verb to the command line."""
    parser = add_verb(
        verbs,
        "activate",
        run,
        help="make a published version the one that is served, forth or back",
        description="Make a published version the active one. Its files are hashed first; running servers follow.",
        examples=_EXAMPLES,
        succeeded="active, and served where that was waited for",
        codes=f"1 refused (nothing written), 2 wrong usage, {EXIT_NOT_SERVED} active, but a server cannot serve it",
    )
    parser.add_argument("name", metavar="NAME", help="name that clients use")
    parser.add_argument("version", metavar="N", type=int, nargs="?", help="version (default: the newest published)")
    add_repository(parser)
    parser.add_argument(
        "--wait",
        nargs="+",
        default=(),
        metavar="HOST:PORT",
        help="end when these servers serve it, or with the reason of one that cannot; their status ports",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the verb. Raises what `activate`, `check_status_address` and `wait_until_served` raise."""
    for url in arguments.wait:
        check_status_address(url)
    console = open_console()

    def tell(version: Version) -> None:
        size = sum(path.stat().st_size for path in version.list_files())
        if size >= _SLOW_BYTES:
            what = f"hashing version {version.number} of {version.name}, {size / 1e6:.0f} MB"
            console.print(what, markup=False, highlight=False, soft_wrap=True)

    done = activate(arguments.repository, arguments.name, arguments.version, tell)
    golden = find_version(arguments.repository, done.name, done.version).read_golden_sum()
    for url in arguments.wait:
        wait_until_served(url, done.name, done.version, partial(console.print, markup=False, soft_wrap=True), golden)
    before = f", version {done.before} before" if done.before else ""
    what = (
        f"version {done.version} is active{before}"
        if done.outcome == "activated"
        else f"version {done.version} was active already"
    )
    lines = [f"{done.name}: {what}" + "".join(f"\nserved by {url}" for url in arguments.wait)]
    if not arguments.wait:
        lines.append(f"Next: {name_command('check', '--repository', arguments.repository)}")
    content = asdict(done) | {"served_by": list(arguments.wait)}
    answer(arguments, content, "\n".join(lines).split("\n"), f"version {done.version} of {done.name} is active")
    return 0
