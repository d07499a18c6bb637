"""What is different between two versions, told from their locks. Needs no torch."""

from collections.abc import Mapping
from typing import Any

# How many files are named.
_MAX_NAMES = 4


def describe_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return one line for each thing that a later lock says otherwise: files, options, target, tools.

    Args:
        before: The lock of the earlier version.
        after: The lock of the later one.
    """
    lines = []
    for source in sorted({*before["sources"], *after["sources"]}):
        lines += _describe_files(source, _files(before, source), _files(after, source))
    for key, what in (("options", "option "), ("target", "target: "), ("versions", "")):
        lines += _describe_values(what, before[key], after[key])
    return lines


def _files(lock: Mapping[str, Any], source: str) -> Mapping[str, str]:
    files: Mapping[str, str] = lock["sources"].get(source, {}).get("files", {})
    return files


def _describe_files(source: str, before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    kinds = {
        "other bytes in": [name for name in after if name in before and after[name] != before[name]],
        "now with": [name for name in after if name not in before],
        "now without": [name for name in before if name not in after],
    }
    return [f"{source}: {kind} {_list_names(names)}" for kind, names in kinds.items() if names]


def _describe_values(what: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    lines = []
    for key in sorted({*before, *after}):
        old, new = before.get(key), after.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            lines += _describe_values(what, old, new)
        elif old != new:
            lines.append(f"{what}{key.replace('_', ' ')}: {describe_value(new)}, before {describe_value(old)}")
    return lines


def describe_value(value: Any) -> str:
    """Return a plain value of a lock as people read it."""
    if value is None or value == [] or value == {}:
        return "none"
    if isinstance(value, list):
        return ", ".join(describe_value(item) for item in value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key.replace('_', ' ')} {describe_value(item)}" for key, item in value.items())
    return str(value)


def _list_names(names: list[str]) -> str:
    more = f", +{len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(sorted(names)[:_MAX_NAMES]) + more
