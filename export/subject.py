"""What the report page says of the thing that was verified, and of what has changed since the version before."""

from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from .identity import describe_options
from .options import ExportRequest
from .proof.report_page import Subject
from .repository.contents import list_versions
from .repository.differences import describe_changes, describe_value
from .repository.version import Version
from .source import Source

# Options that have a line of their own, or say nothing of the model.
_TOLD = {"name", "target", "precision", "engine", "task", "factory", "inputs"}


def describe_subject(
    request: ExportRequest, source: Source, engine: str, lock: Mapping[str, Any], version: Version
) -> Subject:
    """Return what is published as `version`.

    Args:
        request: What was asked for.
        source: What was exported.
        engine: Name of what runs it.
        lock: The lock of the new version.
        version: Where it is being published.
    """
    facts = {
        "checkpoint": f"{source.origin}, {source.parameters / 1e6:.1f} M parameters",
        "fetched from": request.address,
        "missing": "; ".join(source.missing),
        **{f"SHA-256 of {what}": _describe_hash(content) for what, content in lock["sources"].items()},
        "published": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "task": f"{source.task.name}: {source.task.description}",
        "precision": f"{request.precision}, run by {engine} of Triton {request.target}",
        "options": _describe_options(request),
        "tokens added": ", ".join(source.rows.added) if source.rows else "",
    }
    before = _find_before(version)
    return Subject(
        facts={what: text for what, text in facts.items() if text},
        before=before.number if before else 0,
        changes=describe_changes(before.read_lock(), lock) if before else (),
        warnings=source.task.warnings,
    )


def _describe_hash(content: Mapping[str, Any]) -> str:
    files = list(content["files"].items())
    # The hash of one file is one that `sha256sum` prints.
    return f"{files[0][1]}, {files[0][0]}" if len(files) == 1 else f"{content['sha256']}, of {len(files)} files"


def _describe_options(request: ExportRequest) -> str:
    """Return the options that are not as they would be without any."""
    usual = describe_options(ExportRequest(checkpoint=Path(), name=request.name))
    asked = describe_options(request)
    chosen = {}
    for key, value in asked.items():
        if isinstance(value, Mapping) and key in usual:
            chosen.update({name: item for name, item in value.items() if item != usual[key].get(name)})
        elif key not in _TOLD and value != usual[key]:
            chosen[key] = value
    return "; ".join(f"{name.replace('_', ' ')}: {_describe_option(value)}" for name, value in chosen.items()) or "none"


def _describe_option(value: Any) -> str:
    if isinstance(value, tuple | list):
        return ", ".join(_describe_option(item) for item in value)
    return value.name if isinstance(value, Path) else describe_value(value)


def _find_before(version: Version) -> Version | None:
    """Return the newest earlier version that has a lock."""
    numbers = [number for number in list_versions(version.repository / version.name) if number < version.number]
    earlier = (Version(repository=version.repository, name=version.name, number=number) for number in reversed(numbers))
    return next((each for each in earlier if each.read_lock()), None)
