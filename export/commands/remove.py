"""The verb `remove`: a whole model out of the repository."""

import argparse
from dataclasses import asdict

from ..repository.retirement import remove_model
from .prune import describe
from .verb import Verbs, add_repository, add_verb, answer

_EXAMPLES = (
    "tickets --repository /srv/models",
    "tickets --repository /srv/models --json",
    "old_tickets --repository ./models",
)


def add_parser(verbs: "Verbs[argparse.ArgumentParser]") -> None:
    """Add the verb to the command line."""
    parser = add_verb(
        verbs,
        "remove",
        run,
        help="remove a model with all its versions; running servers unload it",
        description="Remove a model with all its versions. Running servers unload it, and refuse its requests then.",
        examples=_EXAMPLES,
        succeeded="removed",
        codes="1 refused (one sentence on stderr) or some of the files stay, 2 wrong usage",
    )
    parser.add_argument("name", metavar="NAME", help="name that clients use")
    add_repository(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the verb. Raises what `remove_model` raises."""
    done = remove_model(arguments.repository, arguments.name)
    line = describe(done) if done.versions else f"{done.name}: removed what was left of it"
    answer(arguments, asdict(done), [line], f"{done.name} is removed")
    return 0
