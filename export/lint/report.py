"""Findings as text for people, JSON for programs, and annotations for GitHub."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from ..errors import escape_controls
from .finding import Finding, Level

_SHOWN = {Level.ERROR: "error", Level.WARNING: "warning", Level.NOTE: "note"}


def render_text(found: Sequence[Finding], folder: Path) -> str:
    """Return one line a finding and one of their numbers."""
    lines = [f"{each.path}:{each.line}: {_SHOWN[each.level]}: {each.sentence} [{each.rule}]" for each in found]
    return "".join(escape_controls(line) + "\n" for line in [*lines, f"{folder}: {_count(found)}"])


def render_json(found: Sequence[Finding], folder: Path) -> str:
    """Return an object with the numbers of each level and the findings."""
    entries = [
        {
            "rule": each.rule,
            "level": _SHOWN[each.level],
            "model": each.model,
            "path": str(each.path),
            "line": each.line,
            "what": each.what,
            "instead": each.instead,
        }
        for each in found
    ]
    numbers = {word: sum(entry["level"] == word for entry in entries) for word in _SHOWN.values()}
    return json.dumps({"repository": str(folder), "counts": numbers, "findings": entries}, indent=2) + "\n"


def render_github(found: Sequence[Finding], folder: Path) -> str:
    """Return what GitHub Actions shows beside the lines (docs.github.com, "Workflow commands")."""
    lines = [
        f"::{each.level.value} file={_escape_property(str(each.path))},line={each.line},title={each.rule}"
        f"::{_escape(each.sentence)}"
        for each in found
    ]
    return "".join(line + "\n" for line in [*lines, _escape(f"{folder}: {_count(found)}")])


FORMATS: dict[str, Callable[[Sequence[Finding], Path], str]] = {
    "text": render_text,
    "json": render_json,
    "github": render_github,
}
"""Name → how findings are written."""


def _count(found: Sequence[Finding]) -> str:
    numbers = Counter(each.level for each in found)
    parts = [
        f"{numbers[level]} {word}{'s' * (numbers[level] != 1)}" for level, word in _SHOWN.items() if numbers[level]
    ]
    return ", ".join(parts) or "nothing found"


def _escape(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escape_property(text: str) -> str:
    return _escape(text).replace(":", "%3A").replace(",", "%2C")
