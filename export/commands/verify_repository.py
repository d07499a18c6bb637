"""The verb `verify-repository`: whether the bytes are still those that were proven."""

import argparse
from dataclasses import asdict

from ..repository.integrity import find_damage
from ..repository.version import Version
from .verb import Verbs, add_repository, add_verb, answer, count, open_console

_EXAMPLES = (
    "--repository /srv/models",
    "--repository /mnt/backup/models",
    "--repository /srv/models --json | jq .findings",
)


def add_parser(verbs: "Verbs[argparse.ArgumentParser]") -> None:
    """Add the verb to the command line."""
    parser = add_verb(
        verbs,
        "verify-repository",
        run,
        help="hash every published file and compare it with what was proven",
        description="Hash every file of every version and compare it with its SHA256SUMS and its lock. Writes nothing.",
        examples=_EXAMPLES,
        succeeded="all is as it was published",
        codes="1 something is not (a line each on stdout) or refused, 2 wrong usage",
    )
    add_repository(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the verb; return 1 if something is not as it was published. Raises what `find_damage` raises."""
    seen: list[Version] = []
    with open_console().status("hashing") as status:

        def tell(version: Version) -> None:
            seen.append(version)
            status.update(f"hashing version {version.number} of {version.name}")

        findings = list(find_damage(arguments.repository, tell))
    damaged = {(finding.name, finding.version) for finding in findings}
    verdict = count(len(findings), "finding") if findings else "every file is as it was published"
    content = {
        "repository": str(arguments.repository),
        "versions": [
            {"name": version.name, "version": version.number, "whole": (version.name, version.number) not in damaged}
            for version in seen
        ],
        "findings": [asdict(finding) | {"path": str(finding.path)} for finding in findings],
    }
    answer(arguments, content, [*map(str, findings), f"{count(len(seen), 'version')}: {verdict}"])
    return int(bool(findings))
