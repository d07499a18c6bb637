"""Which serving options have no effect on a model, whatever else it is. Needs no torch."""

from ..engines.engine import Engine
from ..engines.limits import LEAN_THREADS_PARAMETER
from ..errors import SettingsError
from ..serving_options import ServingOptions

# What needs requests that are joined, and thus wait in a queue of Triton's.
_QUEUE = {
    "max_queue_size",
    "max_queue_delay_microseconds",
    "default_timeout_microseconds",
    "timeout_action",
    "priority_levels",
    "default_priority_level",
    "prefetch",
}

# What a backend that writes text has beside a queue.
_GENERATION = {"kv_cache_mb", "max_num_seqs"}


def refuse_idle(serving: ServingOptions, engine: Engine, *, is_lean: bool, is_batched: bool, has_lengths: bool) -> None:
    """Refuse what would have no effect on a model.

    Args:
        serving: What was asked for.
        engine: What runs the model.
        is_lean: Whether one process does what the steps of an ensemble would do.
        is_batched: Whether Triton joins its requests.
        has_lengths: Whether its graph takes tokens of texts.

    Raises:
        SettingsError: One of them would have none.
    """
    asked = {name for name, value in vars(serving).items() if value}
    idle = engine.idle_options | (set() if find_threads_parameter(engine, is_lean=is_lean) else {"threads"})
    reasons = (
        (asked & idle, f"where {engine.title} runs the model"),
        (asked & _QUEUE - engine.parameter_options if not is_batched else set(), "where Triton joins no requests"),
        (asked & _GENERATION - engine.parameter_options, "where no text is written by modelyard's own backend"),
        (asked & {"max_queue_delay_microseconds", "warmup"} if is_lean else set(), "with --steps lean"),
        (asked & {"warmup"} if not has_lengths else set(), "where the graph takes no tokens of texts"),
    )
    for names, where in reasons:
        if names:
            flags = ["--" + name.replace("_", "-") for name in sorted(names)]
            raise SettingsError(
                f"{', '.join(flags)} {'has' if len(flags) == 1 else 'have'} no effect {where}",
                expected="what it can do otherwise",
                got=", ".join(f"{name} {vars(serving)[name]}" for name in sorted(names)),
                remedy=f"leave {'it' if len(flags) == 1 else 'them'} out, in modelyard.toml as well",
            )


def find_threads_parameter(engine: Engine, *, is_lean: bool) -> str:
    """Return the parameter that says how many threads a copy of the graph has; empty where none does."""
    return LEAN_THREADS_PARAMETER if is_lean else engine.threads_parameter
