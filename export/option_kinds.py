"""What an option is: how it is written on the command line and in a file, and what it has no effect without.

Imports nothing heavy, so that `--help` answers at once.
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

# What every field of a configuration holds.
MAX_COUNT = 2**31 - 1
# Of threads or processes: more than the cores of any machine, and few enough that an operating system starts them.
MAX_WORKERS = 1024


class Needs(Enum):
    """What an option has no effect without; the value says in a refusal when that is."""

    NOTHING = ""
    CHECKPOINT = "without a CHECKPOINT"
    # The model is then built by transformers, of the checkpoint's own configuration.
    ARCHITECTURE = "beside --factory"
    FACTORY = "without --factory"


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What the values of an option are.

    Attributes:
        expected: What a value is called in a refusal.
        parse: Makes a value from a word of the command line; raises ValueError where the word is not one.
        read: Makes a value from JSON, or the list of all items of a repeated option; raises ValueError.
        metavar: What stands for a value in `--help`; empty for a switch, which is named alone.
        collect: Makes the value from all items of an option that may be given several times; None for any other.
    """

    expected: str
    parse: Callable[[str], Any]
    read: Callable[[Any], Any]
    metavar: str
    collect: Callable[[list[Any]], Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option of `run`.

    Attributes:
        name: Key in a file of options.
        kind: What its values are.
        help: Line for `--help`.
        choices: The only values that are taken; any of its kind where there are none.
        needs: What it has no effect without.
        group: Heading in `--help`; empty for those that come first.
        flag: Name on the command line, where that is not spelled like `name`.
        metavar: What stands for a value in `--help`, where the kind's is too general.
    """

    name: str
    kind: Kind
    help: str
    choices: tuple[str, ...] = ()
    needs: Needs = Needs.NOTHING
    group: str = ""
    flag: str = ""
    metavar: str = ""

    def __post_init__(self) -> None:
        if not self.flag:
            object.__setattr__(self, "flag", "--" + self.name.replace("_", "-"))

    def add_to(self, parser: "argparse._ActionsContainer") -> None:
        """Add it to a command line; what is not given there is None."""
        if self.kind is FLAG:
            parser.add_argument(self.flag, dest=self.name, action="store_true", default=None, help=self.help)
        elif self.kind is SWITCH:
            action = argparse.BooleanOptionalAction
            parser.add_argument(self.flag, dest=self.name, action=action, default=None, help=self.help)
        else:
            repeated: dict[str, Any] = {"nargs": "+", "action": "extend"} if self.kind.collect else {}
            parser.add_argument(
                self.flag,
                dest=self.name,
                type=self._parse,
                choices=self.choices or None,
                metavar=self.metavar or (None if self.choices else self.kind.metavar),
                help=self.help,
                **repeated,
            )

    def _parse(self, word: str) -> Any:
        try:
            return self.kind.parse(word)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected {self.kind.expected}, got {word!r}") from None


def declare(*options: Option, default: Any = MISSING, default_factory: Any = MISSING, **common: Any) -> Any:
    """Return a dataclass field that is filled by `options`: one, or several whose items follow one another.

    Args:
        options: What the user gives.
        default: Its value where none of them is given.
        default_factory: Makes that value, where it cannot be shared.
        common: Attributes that all of them have, such as the group.
    """
    declared = tuple(replace(option, **common) for option in options)
    return field(default=default, default_factory=default_factory, metadata={"options": declared})


def _read_text(value: Any) -> str:
    # An empty word is a script's variable that was never set.
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise ValueError
    return value


def _read_path(value: Any) -> Path:
    return Path(_read_text(value))


def _read_switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _read_integer(value: Any) -> int:
    # True is an int to Python.
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError
    return value


def _read_count(value: Any, maximum: int = MAX_COUNT) -> int:
    if not 1 <= _read_integer(value) <= maximum:
        raise ValueError
    return int(value)


def _read_counts(value: Any) -> list[int]:
    if not isinstance(value, list):
        raise ValueError
    return [_read_count(item) for item in value]


def _parse_named_count(word: str) -> tuple[str, int]:
    name, _, value = word.partition("=")
    return _read_text(name), _read_count(int(value))


def _read_number(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError
    return value


def _parse_bound(word: str) -> tuple[str, float]:
    name, _, value = word.partition("=")
    return _read_text(name), _read_number(float(value))


def _read_paths(value: Any) -> list[Path]:
    if not isinstance(value, list):
        raise ValueError
    return [_read_path(item) for item in value]


def read_pairs(make: Callable[[str, Any], Any]) -> Callable[[Any], list[Any]]:
    """Return what reads a JSON object as the items that `make` makes of each key and value."""

    def read(value: Any) -> list[Any]:
        if not isinstance(value, dict):
            raise ValueError
        return [make(_read_text(key), item) for key, item in value.items()]

    return read


def bounded_count(maximum: int) -> Kind:
    """Return the kind of an option whose values are whole numbers from 1 to `maximum`."""
    return Kind(
        expected=f"a whole number from 1 to {maximum}",
        parse=lambda word: _read_count(int(word), maximum),
        read=lambda value: _read_count(value, maximum),
        metavar="N",
    )


def named_counts(what: str, metavar: str) -> Kind:
    """Return the kind of an option that gives whole numbers to names, called `what` in a refusal."""
    return Kind(
        expected=f"{what}, each {metavar} on the command line and a whole number of at least 1 under its name in a "
        "file",
        parse=_parse_named_count,
        read=read_pairs(lambda key, value: (key, _read_count(value))),
        metavar=metavar,
        collect=dict,
    )


TEXT = Kind(expected="a text", parse=_read_text, read=_read_text, metavar="TEXT")
PATH = Kind(expected="a path", parse=_read_path, read=_read_path, metavar="DIR")
PATHS = Kind(expected="a list of paths", parse=_read_path, read=_read_paths, metavar="DIR", collect=tuple)
INTEGER = Kind(expected="a whole number", parse=int, read=_read_integer, metavar="N")
COUNT = bounded_count(MAX_COUNT)
COUNTS = Kind(
    expected=f"whole numbers from 1 to {MAX_COUNT}, in a file a list",
    parse=lambda word: _read_count(int(word)),
    read=_read_counts,
    metavar="N",
    collect=lambda items: tuple(sorted(set(items))),
)
NUMBER = Kind(expected="a number", parse=lambda word: _read_number(float(word)), read=_read_number, metavar="X")
BOUNDS = Kind(
    expected="bounds, each NAME=VALUE on the command line and a number under its name in a file",
    parse=_parse_bound,
    read=read_pairs(lambda key, value: (key, _read_number(value))),
    metavar="NAME=VALUE",
    collect=dict,
)
# The first can only be turned on, the second off as well.
FLAG = Kind(expected="true or false", parse=bool, read=_read_switch, metavar="")
SWITCH = Kind(expected="true or false", parse=bool, read=_read_switch, metavar="")
