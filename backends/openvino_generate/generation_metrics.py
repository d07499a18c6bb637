"""What Prometheus is told of one version, beside what Triton counts itself."""

import time
from collections.abc import Mapping
from typing import Any, ClassVar

import triton_python_backend_utils as pb_utils

# Telling Triton takes a message for each number.
_SHOW_INTERVAL_S = 0.2


class Metrics:
    """Counters and gauges of one version.

    Args:
        labels: The model and its version.
    """

    COUNTERS: ClassVar[Mapping[str, str]] = {
        "prompt_tokens": "tokens of prompts that joined",
        "generation_tokens": "tokens that were written",
        "cancelled": "requests whose caller left",
        "first_tokens": "requests whose first token was written",
        "first_token_seconds": "seconds from a request to its first token, of all of them",
    }
    GAUGES: ClassVar[Mapping[str, str]] = {
        "running": "requests that a token is written of in every step",
        "waiting": "requests that have no place yet",
        "cache_usage_percent": "part of the pool of keys and values that is taken",
    }

    def __init__(self, labels: dict[str, str]) -> None:
        kinds = pb_utils.MetricFamily
        # A family lives as long as this object.
        self._families = []
        self._metrics = {}
        for kind, described in ((kinds.COUNTER, self.COUNTERS), (kinds.GAUGE, self.GAUGES)):
            for name, text in described.items():
                end = "_total" if kind == kinds.COUNTER else ""
                family = kinds(name=f"modelyard_generate_{name}{end}", description=text, kind=kind)
                self._families.append(family)
                self._metrics[name] = family.Metric(labels=labels)
        self._pending = dict.fromkeys(self.COUNTERS, 0.0)
        self._shown_at = 0.0
        self._is_shown_idle = True

    def count(self, name: str, value: float) -> None:
        """Add to a counter."""
        self._pending[name] += value

    def show_begin(self, in_flight: int) -> None:
        """Tell Triton before the first step that there is something to do: a step may take seconds."""
        if self._is_shown_idle and in_flight:
            self._is_shown_idle = False
            self._metrics["waiting"].set(in_flight)

    def show(self, state: Any, in_flight: int) -> None:
        """Tell Triton, which takes a message for each number: a few times a second, and when all is done."""
        now = time.monotonic()
        if now - self._shown_at < _SHOW_INTERVAL_S and in_flight:
            return
        self._shown_at, self._is_shown_idle = now, not in_flight
        for name, value in self._pending.items():
            if value:
                self._metrics[name].increment(value)
        self._pending = dict.fromkeys(self.COUNTERS, 0.0)
        running = state.scheduled_requests if in_flight else 0
        self._metrics["running"].set(running)
        self._metrics["waiting"].set(max(0, in_flight - running))
        self._metrics["cache_usage_percent"].set(state.cache_usage if in_flight else 0.0)
