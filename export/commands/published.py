"""What `inspect` says of a model in a repository: its versions, and what each was made of."""

from pathlib import Path
from typing import Any

from ..errors import escape_controls
from ..repository.contents import find_active_version, find_owner, list_versions
from ..repository.facts import find_engine, list_judged
from ..repository.version import Version


def describe_model(directory: Path) -> dict[str, Any]:
    """Return what the folder of a public model, or of one of its steps, tells of the public model.

    Raises:
        RepositoryError: A configuration cannot be read.
    """
    repository = directory.absolute().parent
    name = find_owner(repository, directory.name) or directory.name
    active = find_active_version(repository, name)
    numbers = list_versions(repository / name)
    versions = [_describe_version(Version(repository=repository, name=name, number=number)) for number in numbers]
    return {"name": name, "repository": str(repository), "active": active, "versions": versions}


def _describe_version(version: Version) -> dict[str, Any]:
    lock, report = version.read_lock(), version.read_report()
    options = lock.get("options", {})
    return {
        "version": version.number,
        "bytes": sum(path.stat().st_size for path in version.list_files()),
        "checkpoint_sha256": lock.get("sources", {}).get("checkpoint", {}).get("sha256"),
        "target": report.get("target"),
        "precision": options.get("precision"),
        "engine": find_engine(report, lock) or None,
        "passed": report.get("passed"),
        "cases": len(list_judged(report)),
    }


def _name_engine(engine: str | None) -> str:
    # None is what the lock records where the task chose its own.
    return f"{engine} of " if engine else ""


def format_model(told: dict[str, Any]) -> str:
    """Return the same as lines of text for a reader."""
    lines = [f"{told['name']} in {told['repository']}"]
    for version in told["versions"]:
        active = " (active)" if version["version"] == told["active"] else ""
        facts = {
            "size": f"{version['bytes'] / 1e6:.1f} MB",
            "checkpoint": f"SHA-256 {version['checkpoint_sha256']}" if version["checkpoint_sha256"] else "",
            "made as": f"{version['precision']}, for {_name_engine(version['engine'])}Triton {version['target']}"
            if version["precision"]
            else "",
            "proof": f"{version['cases']} cases, {'all passed' if version['passed'] else 'not all passed'}",
        }
        lines += [f"version {version['version']}{active}"]
        lines += [f"  {label:12} {text}" for label, text in facts.items() if text]
    if not told["versions"]:
        lines.append("no version")
    return "".join(escape_controls(line) + "\n" for line in lines)
