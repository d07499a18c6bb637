"""What a rule finds, and what a rule is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .model import Model, Repository


class Level(str, Enum):
    """How bad it is; the values are the words that GitHub's annotations use as well."""

    ERROR = "error"
    """The target does not load the model."""
    WARNING = "warning"
    """It loads, or may load, and does something else than was probably meant."""
    NOTE = "notice"
    """Worth knowing."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One place that breaks a rule.

    Attributes:
        path: The file, or the folder where one is missing.
        line: Line of the file, from 1.
        what: What is wrong, as the first half of a sentence.
        instead: What to write there or to do, as its second half.
    """

    path: Path
    line: int = 1
    what: str
    instead: str


# Looks at one model among the others.
Check = Callable[["Model", "Repository"], Iterator[Problem]]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule.

    Attributes:
        name: What reports and suppressions call it.
        level: How bad a place is that breaks it.
        help: What it says, in one line.
        check: Finds the places.
        wrong: An example that breaks it.
        right: The same example as it should be.
    """

    name: str
    level: Level
    help: str
    check: Check
    wrong: str
    right: str


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A problem under its rule's name and level, of one model."""

    rule: str
    level: Level
    model: str
    path: Path
    line: int
    what: str
    instead: str

    @property
    def sentence(self) -> str:
        """What is wrong and what to write instead."""
        return f"{self.what}; {self.instead}."
