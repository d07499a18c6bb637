"""The `adapter_config.json` of a low-rank adapter, as peft writes it and as far as it is followed here."""

import re
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checkpoints.adapter_names import ADAPTER_FILE
from ..checkpoints.storage.paths import read_json_if_any
from ..errors import AdapterError, list_some

# Each may try every place of the path anew: with more of them a pattern may take hours.
_MOST_REPEATS = 3
_REPEAT = re.compile(r"[*+]|\{\d*,\d*\}")
_REPEATED_GROUP = re.compile(r"\)\s*(?:[*+]|\{)")

# Initialisations that change the base weights as well, so that the adapter belongs to none that is on disk.
_CHANGED_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")

# peft's own, where a configuration leaves them out.
DEFAULT_RANK, DEFAULT_ALPHA = 8, 8
_SWITCHES = ("use_rslora", "fan_in_fan_out")


def read_adapter_settings(folder: Path) -> Mapping[str, Any]:
    """Return `adapter_config.json`, of a kind that is merged here.

    Raises:
        AdapterError: There is none, or it asks for something other than plain LoRA.
    """
    settings = read_json_if_any(folder / ADAPTER_FILE) if folder.is_dir() else None
    if not isinstance(settings, Mapping):
        found = sorted(path.parent.name for path in folder.glob("*/adapter_config.json"))
        raise AdapterError(
            f"{folder} holds no adapter_config.json",
            expected="the folder of one adapter as peft saves it",
            got=f"folders of {list_some(found)}" if found else "none",
            remedy="pass the folder of the adapter that is to be merged",
        )
    started = str(settings.get("init_lora_weights", "")).lower()
    unusual = {
        f"peft_type {settings.get('peft_type')}": settings.get("peft_type") != "LORA",
        "use_dora": bool(settings.get("use_dora")),
        "lora_bias": bool(settings.get("lora_bias")),
        "trainable_token_indices": bool(settings.get("trainable_token_indices")),
        "target_parameters": bool(settings.get("target_parameters")),
        "layer_replication": bool(settings.get("layer_replication")),
        f"init_lora_weights {started}": started.startswith(_CHANGED_BASE),
    }
    unsupported = [what for what, is_there in unusual.items() if is_there]
    if unsupported:
        raise AdapterError(
            f"the adapter in {folder} is of a kind that is not merged",
            expected="plain LoRA",
            got=", ".join(unsupported),
            remedy="merge it with peft and export the result",
        )
    _check_settings(folder, settings)
    return settings


def _check_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Refuse settings of other types than peft writes, which would be taken for something that they do not say.

    Raises:
        AdapterError: One is.
    """
    alphas, ranks = settings.get("alpha_pattern") or {}, settings.get("rank_pattern") or {}
    saved = settings.get("modules_to_save") or []
    wanted = {
        "lora_alpha": ("a number", _is_number(settings.get("lora_alpha", DEFAULT_ALPHA))),
        "alpha_pattern": ("patterns and numbers", isinstance(alphas, dict) and all(map(_is_number, alphas.values()))),
        "r": ("a rank of 1 or more", _is_rank(settings.get("r", DEFAULT_RANK))),
        "rank_pattern": ("patterns and ranks", isinstance(ranks, dict) and all(map(_is_rank, ranks.values()))),
        "modules_to_save": ("names", isinstance(saved, list) and all(isinstance(name, str) for name in saved)),
        **{key: ("true or false", isinstance(settings.get(key, False), bool | None)) for key in _SWITCHES},
    }
    for key, (expected, is_right) in wanted.items():
        if not is_right:
            raise AdapterError(
                f"{key} in {folder / ADAPTER_FILE} is not what peft writes",
                expected=expected,
                got=repr(settings.get(key))[:80],
                remedy="copy the file that was saved with the adapter",
            )
    for pattern in (*alphas, *ranks):
        _check_pattern(folder, pattern)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _check_pattern(folder: Path, pattern: str) -> None:
    """Refuse a pattern that is none, or that may be tried for hours: nothing is run for ever that a file holds.

    Raises:
        AdapterError: It is.
    """
    try:
        with warnings.catch_warnings():
            # Python 3.10 takes flags that stand elsewhere than at the start; newer ones, and peft on these, do not.
            warnings.simplefilter("error", DeprecationWarning)
            _compile(pattern)
        is_quick = not _REPEATED_GROUP.search(pattern) and len(_REPEAT.findall(pattern)) <= _MOST_REPEATS
    except (re.error, OverflowError, RecursionError, DeprecationWarning):
        is_quick = False
    if not is_quick:
        raise AdapterError(
            f"a pattern in {folder / ADAPTER_FILE} cannot be followed",
            expected=f"a regular expression with {_MOST_REPEATS} repeats at most, and none of a group",
            got=repr(pattern)[:80],
            remedy="merge the adapter with peft and export the result",
        )


def match_pattern(patterns: Mapping[str, Any] | None, path: str, default: Any) -> Any:
    """Return the value of the first pattern that matches the end of `path`, as peft's `get_pattern_key` does."""
    for pattern, value in (patterns or {}).items():
        if _compile(pattern).match(path):
            return value
    return default


def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"(.*\.)?({pattern})$")
