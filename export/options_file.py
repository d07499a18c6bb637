"""Options from a file: JSON, or a `modelyard.toml` with a table for each model. Imports nothing heavy."""

import difflib
import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from .errors import SettingsError
from .option_kinds import Option

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# The key, beside the options, whose tables are variants of how a model is served.
VARIANTS = "configs"

# Read where it lies in the working directory and no other file is named.
OPTIONS_FILE = "modelyard.toml"

# The table of every model, and the one that holds those of single models.
_DEFAULT, _MODELS = "default", "models"

_VARIANT_NAME = re.compile(r"[A-Za-z0-9_-]+")

_TABLE = re.compile(r"\s*\[(?!\[)")


@dataclass(frozen=True, kw_only=True)
class _Table:
    """Options as they stand in a file.

    Attributes:
        content: Option → value.
        locate: Returns the file, and the line of a key where that is known, given the tables around it and the key.
    """

    content: Mapping[str, Any]
    locate: Callable[..., str]


def read_file(
    path: Path, name: str, options: list[Option], variable: list[Option], tell: Callable[[str], None]
) -> dict[str, Any]:
    """Return option → its value for the model `name`, or the list of its items; and under `VARIANTS` its variants.

    Args:
        path: JSON or TOML.
        name: The model.
        options: What may be said of it.
        variable: What a variant may say otherwise.
        tell: Called where there are tables of models, and none of this one.

    Raises:
        SettingsError: The file cannot be read, or holds a key or a value that cannot be used.
    """
    tables = _read_toml(path, name, tell) if path.suffix == ".toml" else [_read_json(path)]
    known = {option.name: option for option in options}
    settings: dict[str, Any] = {}
    variants: dict[str, dict[str, Any]] = {}
    for table in tables:
        plain = {key: value for key, value in table.content.items() if key != VARIANTS}
        settings |= {key: _read_value(table.locate(key), key, value, known, VARIANTS) for key, value in plain.items()}
        for variant, values in _read_variants(table, variable).items():
            variants[variant] = variants.get(variant, {}) | values
    return settings | ({VARIANTS: variants} if variants else {})


def _read_variants(table: _Table, variable: list[Option]) -> dict[str, dict[str, Any]]:
    """Return variant → option → value, of the table of variants in a table, if there is one."""
    found = table.content.get(VARIANTS, {})
    place = table.locate(VARIANTS)
    if not isinstance(found, dict) or not all(isinstance(values, dict) for values in found.values()):
        what = f"{VARIANTS} in {place} holds no variants"
        raise SettingsError(what, expected="a table of options for each name", got=json.dumps(found, default=str))
    for name in found:
        if not _VARIANT_NAME.fullmatch(name):
            raise SettingsError(
                f"{VARIANTS} in {place} has a variant that cannot be named so",
                expected="letters, digits, _ and -",
                got=json.dumps(name),
            )
    known = {option.name: option for option in variable}
    return {
        name: {key: _read_value(table.locate(VARIANTS, name, key), key, value, known) for key, value in values.items()}
        for name, values in found.items()
    }


def find_nearest(word: str, known: Mapping[str, Any]) -> str:
    """Return the known key that was probably meant, empty where none is; the end of a long one may be missing."""
    near = difflib.get_close_matches(word, [part for key in known for part in (key, key[: len(word)])], n=1)
    return next((key for key in known if near and key.startswith(near[0])), "")


def _read_json(path: Path) -> _Table:
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    # Python gives up on a thousand brackets within one another.
    except (OSError, ValueError, RecursionError) as exc:
        raise SettingsError(f"{path} cannot be read", expected="a JSON file", got=str(exc).rstrip(".")) from exc
    if not isinstance(content, dict):
        raise SettingsError(f"{path} holds no options", expected="an object", got=type(content).__name__)
    return _Table(content=content, locate=lambda *keys: str(path))


def _read_toml(path: Path, name: str, tell: Callable[[str], None]) -> list[_Table]:
    """Return the table of every model and that of `name`; those of other models are checked by their own export."""
    text, content = _load_toml(path)
    for key in content:
        if key not in (_DEFAULT, _MODELS):
            raise SettingsError(
                f"{_locate(path, text, (), key)} has the unknown table {key}",
                expected=f"[{_DEFAULT}] or [{_MODELS}.NAME]",
                got=key,
                remedy=_suggest_table(key),
            )
    models = content.get(_MODELS, {})
    if isinstance(models, dict) and models and name not in models:
        near = find_nearest(name, models)
        meant = f"; did you mean [{_MODELS}.{near}]" if near else ""
        tell(f"{path} has no table of {name}, but of {', '.join(models)}{meant}")
    tables: list[tuple[tuple[str, ...], Any]] = [((_DEFAULT,), content.get(_DEFAULT, {}))]
    tables.append(((_MODELS, name), models.get(name, {}) if isinstance(models, dict) else models))
    for place, table in tables:
        if not isinstance(table, dict):
            what = f"{_locate(path, text, (), place[0])} has no table {'.'.join(place)}"
            raise SettingsError(what, expected="options below its name in brackets", got=json.dumps(table, default=str))
    return [_Table(content=table, locate=partial(_locate, path, text, place)) for place, table in tables]


def has_table(path: Path, name: str) -> bool:
    """Tell whether a TOML file has a table of the model `name`.

    Raises:
        SettingsError: It cannot be read.
    """
    models = _load_toml(path)[1].get(_MODELS, {})
    return isinstance(models, dict) and name in models


def _load_toml(path: Path) -> tuple[str, dict[str, Any]]:
    try:
        # A pipe would be waited for, and a device may never end.
        if path.exists() and not path.is_file():
            raise ValueError("no regular file")
        # Editors of Windows begin a file with a byte order mark.
        text = path.read_text(encoding="utf-8-sig")
        return text, tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as exc:
        raise SettingsError(f"{path} cannot be read", expected="a TOML file", got=str(exc).rstrip(".")) from exc


def _suggest_table(key: str) -> str:
    meant = {_DEFAULT: f"did you mean [{_DEFAULT}]", _MODELS: f"did you mean [{_MODELS}.NAME]"}
    near = find_nearest(key, meant)
    return meant[near] if near else f"write [{_MODELS}.{key}] for a model, or the option below [{_DEFAULT}]"


def _locate(path: Path, text: str, place: tuple[str, ...], *keys: str) -> str:
    """Return the file with the line on which a key of a table stands, where it stands on one of its own.

    Args:
        path: The file.
        text: What it holds.
        place: Names of a table and those around it.
        keys: Names of tables in that one, and the key.
    """
    place, key = (*place, *keys[:-1]), keys[-1]
    current: tuple[str, ...] = ()
    wanted = re.compile(rf"\s*[\"']?{re.escape(key)}[\"']?\s*[.=]")
    for number, line in enumerate(text.splitlines(), start=1):
        if _TABLE.match(line):
            current = _read_header(line)
            if current == (*place, key) or (not place and current[:1] == (key,)):
                return f"{path} line {number}"
        elif current == place and wanted.match(line):
            return f"{path} line {number}"
    return str(path)


def _read_header(line: str) -> tuple[str, ...]:
    """Return the names of a table from the line that opens it."""
    try:
        table, names = tomllib.loads(line), []
    # The line of an array that looks like it.
    except ValueError:
        return ()
    while table:
        ((name, table),) = table.items()
        names.append(name)
    return tuple(names)


def _read_value(place: str, key: str, value: Any, known: Mapping[str, Option], *others: str) -> Any:
    option = known.get(key)
    if option is None:
        names = [*known, *others]
        near = find_nearest(key, dict.fromkeys(names))
        raise SettingsError(
            f"{place} has the unknown option {key}",
            expected="one of " + ", ".join(names),
            got=key,
            remedy=f"did you mean {near}" if near else "remove it",
        )
    try:
        read = option.kind.read(value)
    except ValueError:
        raise SettingsError(
            f"{key} in {place} is of another kind", expected=option.kind.expected, got=json.dumps(value, default=str)
        ) from None
    if option.choices and read not in option.choices:
        near = next(iter(difflib.get_close_matches(read, option.choices, n=1)), "")
        raise SettingsError(
            f"{key} in {place} is unknown",
            expected="one of " + ", ".join(option.choices),
            got=read,
            remedy=f"did you mean {near}" if near else "",
        )
    return read
