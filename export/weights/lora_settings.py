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

# What is followed here, or says nothing of what the trained tensors mean: how they began, where they lie, who wrote it.
# Each release of peft has kinds that are told by a setting of their own, so whatever else is set is refused.
_FOLLOWED = frozenset(
    {
        *(
            "task_type",
            "peft_type",
            "auto_mapping",
            "peft_version",
            "base_model_name_or_path",
            "revision",
            "inference_mode",
        ),
        *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "fan_in_fan_out", "bias", "lora_dropout"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save"),
        *("init_lora_weights", "eva_config", "loftq_config", "corda_config", "lora_ga_config"),
        *("ensure_weight_tying", "megatron_config", "megatron_core", "runtime_config", "qalora_group_size"),
        # Notes of Unsloth's, of peft 0.1 on how it ran, and of transformers.
        *("unsloth_fixed", "merge_weights", "_commit_hash", "transformers_version"),
    }
)

# What leaves a setting out. A table is none of it, empty or not: settings of a kind may all have their defaults.
_UNSET: tuple[Any, ...] = (None, False, "", [])

# Beginnings that leave the base weights as they are; with others, the adapter belongs to weights that are not on disk.
_BEGINNINGS = ("true", "false", "none", "gaussian", "eva", "orthogonal", "mica")

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
    begun = str(settings.get("init_lora_weights", True)).lower()
    unsupported = [
        *([] if settings.get("peft_type") == "LORA" else [f"peft_type {settings.get('peft_type')}"]),
        *([] if begun in _BEGINNINGS else [f"init_lora_weights {begun[:80]}"]),
        *(key for key, value in settings.items() if value not in _UNSET and key not in _FOLLOWED),
    ]
    if unsupported:
        raise AdapterError(
            f"the adapter in {folder} is of a kind that is not merged",
            expected="plain LoRA",
            got=list_some(unsupported),
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
