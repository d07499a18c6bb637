"""The options of an export, from the command line and from a JSON file that names them in the same way."""

import difflib
import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from .engines import ENGINES
from .errors import SettingsError
from .graph.precisions import PRECISIONS
from .locations import REPOSITORY
from .request import (
    AGGREGATIONS,
    DEFAULT_RELEASE,
    POOLINGS,
    TASKS,
    UNUSED_ROWS,
    AddedToken,
    ExportRequest,
    TaskOptions,
    VocabularyOptions,
)

# Key of the file → what its value must be.
_KINDS: Mapping[str, tuple[type, ...]] = {
    "repository": (str,),
    "task": (str,),
    "tag": (str,),
    "base": (str,),
    "allow_non_finite": (bool,),
    "adapter": (list,),
    "lora_scaling": (int, float),
    "add_tokens": (dict,),
    "add_special_tokens": (dict,),
    "pad_vocab_to_multiple_of": (int,),
    "unused_rows": (str,),
    "seed": (int,),
    "allow_other_tokenizer": (bool,),
    "top_k": (int,),
    "aggregation": (str,),
    "pooling": (str,),
    "normalize": (bool,),
    "target": (str,),
    "precision": (str,),
    "engine": (str,),
    "tolerances": (dict,),
    "accept_worse": (str,),
    "factory": (str,),
    "inputs": (str,),
}
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "task": tuple(TASKS),
    "unused_rows": UNUSED_ROWS,
    "aggregation": tuple(AGGREGATIONS),
    "pooling": tuple(POOLINGS),
    "precision": tuple(PRECISIONS),
    "engine": tuple(ENGINES),
}


def read_settings(path: Path) -> dict[str, Any]:
    """Return what the file says, checked.

    `add_tokens` and `add_special_tokens` map tokens to initializers; every other key is an option of the command line.

    Raises:
        SettingsError: The file cannot be read, or holds a key or a value that means nothing.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise SettingsError(f"{path} cannot be read", expected="a JSON file", got=str(exc).rstrip(".")) from exc
    if not isinstance(content, dict):
        raise SettingsError(f"{path} holds no options", expected="an object", got=type(content).__name__)
    for key, value in content.items():
        _check_setting(path, key, value)
    return content


def _check_setting(path: Path, key: str, value: Any) -> None:
    if key not in _KINDS:
        near = difflib.get_close_matches(key, _KINDS, n=1)
        raise SettingsError(
            f"{path} has the unknown option {key}",
            expected="one of " + ", ".join(_KINDS),
            got=key,
            remedy=f"did you mean {near[0]}" if near else "remove it",
        )
    kinds = _KINDS[key]
    # True is an int to Python.
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise SettingsError(f"{key} in {path} is of another kind", expected=kinds[0].__name__, got=repr(value))
    if key in _CHOICES and value not in _CHOICES[key]:
        raise SettingsError(
            f"{key} in {path} is unknown", expected="one of " + ", ".join(_CHOICES[key]), got=str(value)
        )
    if key in ("pad_vocab_to_multiple_of", "top_k") and int(str(value)) < 1:
        raise SettingsError(f"{key} in {path} is too small", expected="at least 1", got=str(value))
    if isinstance(value, dict) and key == "tolerances":
        if not all(isinstance(item, int | float) for item in value.values()):
            raise SettingsError(f"{key} in {path} is of another kind", expected="errors and bounds", got=repr(value))
    elif isinstance(value, dict) and not all(isinstance(item, str) for item in value.values()):
        raise SettingsError(f"{key} in {path} is of another kind", expected="tokens and initializers", got=repr(value))


def build_request(arguments: Mapping[str, Any], settings: Mapping[str, Any]) -> ExportRequest:
    """Return what was asked for; the command line wins over the file, and adds its tokens to the file's.

    Args:
        arguments: Of the command line; None where an option was not given.
        settings: Of the file.
    """

    def choose(key: str, default: Any = None) -> Any:
        given = arguments.get(key)
        return settings.get(key, default) if given is None else given

    tokens = [
        AddedToken(token=token, initializer=initializer, special=special)
        for key, special in (("add_special_tokens", True), ("add_tokens", False))
        for token, initializer in settings.get(key, {}).items()
    ]
    tokens += arguments["add_special_token"]
    tokens += [AddedToken(token=t.token, initializer=t.initializer, special=False) for t in arguments["add_token"]]
    return ExportRequest(
        checkpoint=arguments["checkpoint"],
        name=arguments["name"],
        tag=choose("tag"),
        base=Path(choose("base")) if choose("base") else None,
        allow_non_finite=bool(arguments.get("allow_non_finite") or settings.get("allow_non_finite")),
        repository=Path(choose("repository", REPOSITORY)),
        task=choose("task"),
        task_options=TaskOptions(**{field.name: choose(field.name) for field in fields(TaskOptions)}),
        adapters=tuple(Path(folder) for folder in [*settings.get("adapter", []), *arguments.get("adapter", [])]),
        lora_scaling=choose("lora_scaling"),
        target=choose("target", DEFAULT_RELEASE),
        precision=choose("precision", "fp32"),
        engine=choose("engine", "onnxruntime"),
        tolerances=settings.get("tolerances", {}) | dict(arguments.get("tolerance", [])),
        accept_worse=choose("accept_worse"),
        factory=choose("factory"),
        inputs=Path(choose("inputs")) if choose("inputs") else None,
        vocabulary=VocabularyOptions(
            added_tokens=tuple(tokens),
            unused_rows=choose("unused_rows", "keep"),
            pad_to_multiple_of=choose("pad_vocab_to_multiple_of", 1),
            seed=choose("seed", 0),
            allow_other_tokenizer=choose("allow_other_tokenizer", False),
        ),
    )
