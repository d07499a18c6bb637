"""What was measured already, so that a search that was ended goes on where it was."""

import json
from collections.abc import Callable, Hashable
from dataclasses import asdict
from pathlib import Path

from .search import Figures


class Journal:
    """Measurements of one version under one load, one JSON object a line.

    Args:
        path: The file; it need not be there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[str, Figures] = {}
        if path.is_file():
            for line in path.read_text(encoding="utf-8").splitlines():
                # A process that was killed may have left half of one.
                if entry := _parse(line):
                    self._found[entry[0]] = entry[1]

    def __len__(self) -> int:
        """Return how many measurements it holds."""
        return len(self._found)

    def measure(self, key: Hashable, measure: Callable[[], Figures]) -> Figures:
        """Return what was measured under `key`, or measure it and write it down."""
        text = repr(key)
        if text not in self._found:
            self._found[text] = measure()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                # In a line of its own, whatever was left before it.
                file.write("\n" + json.dumps({"key": text, **asdict(self._found[text])}) + "\n")
        return self._found[text]


def _parse(line: str) -> tuple[str, Figures] | None:
    try:
        content = json.loads(line)
        return content.pop("key"), Figures(**content)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
