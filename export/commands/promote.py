"""The verb `promote`: a proven version into another repository, as from staging to production."""

import argparse
from dataclasses import asdict
from pathlib import Path

from ..locations import name_command
from .verb import Verbs, add_repository, add_verb, answer, open_console

_EXAMPLES = (
    "tickets --repository /srv/staging --to /srv/production",
    "tickets 3 --repository /srv/staging --to /srv/production --no-activate",
    "tickets --repository /srv/staging --to /srv/production --json",
)


def add_parser(verbs: "Verbs[argparse.ArgumentParser]") -> None:
    """Add the verb to the command line."""
    parser = add_verb(
        verbs,
        "promote",
        run,
        help="copy a proven version into another repository, and make it active there",
        description="Copy a version with its proof into another repository, hashed before and after, and activate it.",
        examples=_EXAMPLES,
        succeeded="promoted or already there",
    )
    parser.add_argument("name", metavar="NAME", help="name that clients use")
    parser.add_argument("version", metavar="N", type=int, nargs="?", help="version (default: the active one)")
    parser.add_argument("--to", required=True, type=Path, metavar="DIR", help="the other repository")
    parser.add_argument("--no-activate", action="store_true", help="only copy: what is active there stays so")
    add_repository(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the verb. Raises what `promote` raises."""
    # Renders the report's page, which takes a template engine to load.
    from ..repository.promotion import promote

    with open_console().status(f"hashing and copying {arguments.name}"):
        done = promote(
            arguments.repository,
            arguments.name,
            arguments.version,
            destination=arguments.to,
            activates=not arguments.no_activate,
        )
    written = {"created": "new", "switched": "which was there already", "unchanged": "which was there already"}
    lines = [
        f"{done.name}: version {done.source} of {arguments.repository} is version {done.version} of {arguments.to}, "
        f"{written[done.outcome]}; active there is {f'version {done.active}' if done.active else 'none'}"
    ]
    if done.active == done.version:
        lines.append(f"Next: {name_command('check', '--repository', arguments.to)}")
    else:
        then = name_command("activate", done.name, done.version, "--repository", arguments.to)
        lines.append(f"Next: {then}")
    answer(arguments, asdict(done), lines, f"version {done.version} of {done.name} is in {arguments.to}")
    return 0
