"""What configurations ask of tritonserver as a whole, and would be passed over in silence without."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from .model_text import read_fields

# Room for answers of models that ask for them to be kept. It is taken as it is filled.
CACHE_BYTES = 64 << 20

_CACHE = "local"

_COUNT = re.compile(r"count : (\d+)")
# Of the rate limiter, which are counted as well.
_RESOURCES = re.compile(r"resources \[.*?\]")


def list_options(configs: Iterable[str], caches: Path, passed: Sequence[str]) -> list[str]:
    """Return the options of a tritonserver that is about to start.

    Args:
        configs: Texts of the configurations that it loads first.
        caches: Folder of the caches that came with it.
        passed: Options that are handed on, which stand over these.
    """
    options = []
    # Whatever is loaded first: a model that asks for it may be published later.
    if (caches / _CACHE).is_dir() and not has_option(passed, "cache-config"):
        options.append(f"--cache-config={_CACHE},size={CACHE_BYTES}")
    # Only where it is asked for: it has all models wait their turn in one place.
    if any(limits_rate(config) for config in configs) and not has_option(passed, "rate-limit"):
        options.append("--rate-limit=execution_count")
    return options


def has_option(passed: Sequence[str], name: str) -> bool:
    """Tell whether an option is among those that are handed on."""
    return any(word.partition("=")[0] == f"--{name}" for word in passed)


def count_processes(configs: Iterable[str]) -> int:
    """Return how many backend processes serve models of these configurations, and how many more a rollout starts.

    Of models that are rolled out one after another the one with the most is counted twice.
    """
    counts = [count_instances(config) for config in configs]
    return sum(counts) + max(counts, default=0)


def count_instances(config: str) -> int:
    """Return how many backend processes serve a model of this configuration."""
    if _read(config, "ensemble_scheduling"):
        return 0
    # Each group has one where it says nothing, and so has a model without groups.
    groups = _RESOURCES.sub("", _read(config, "instance_group"))
    return max(1, sum(map(int, _COUNT.findall(groups))))


def limits_rate(config: str) -> bool:
    """Tell whether a configuration asks for the rate limiter."""
    return "rate_limiter" in _read(config, "instance_group").split()


def is_decoupled(config: str) -> bool:
    """Tell whether a model of this configuration answers a request in pieces, as one that writes text does."""
    return "decoupled : true" in _read(config, "model_transaction_policy")


def keeps_answers(config: str) -> bool:
    """Tell whether a configuration asks for the response cache."""
    return "enable : true" in _read(config, "response_cache")


def _read(config: str, name: str) -> str:
    try:
        return " ".join(text for key, text in read_fields(config) if key == name)
    # Of what is not a configuration tritonserver says so.
    except ValueError:
        return ""
