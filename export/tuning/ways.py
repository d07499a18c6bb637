"""The ways in which a published model may be served, of which none changes an answer."""

import itertools
import os
from collections.abc import Mapping
from dataclasses import dataclass

from tritonclient.grpc import model_config_pb2 as pb

from ..engines.limits import LEAN_BACKEND, LEAN_THREADS_PARAMETER
from ..engines.table import ENGINES
from ..errors import SettingsError

# Microseconds that a graph waits for requests to join.
_DELAYS = (0, 500, 2000)


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a model is served; each is a serving option of that name.

    Attributes:
        instances: Copies of the graph that run at the same time.
        threads: Threads of one copy; None where the engine has its own.
        max_queue_delay_microseconds: How long the graph waits for requests to join; None where none are joined.
    """

    instances: int
    threads: int | None = None
    max_queue_delay_microseconds: int | None = None

    def to_options(self) -> dict[str, int]:
        """Return serving option → value, those that say what there is without them left out."""
        delay = self.max_queue_delay_microseconds or None
        options = {"instances": self.instances, "threads": self.threads, "max_queue_delay_microseconds": delay}
        return {name: value for name, value in options.items() if value is not None}


def find_graph(configs: Mapping[str, pb.ModelConfig], name: str) -> str:
    """Return which Triton model of a published one runs its graph.

    Raises:
        SettingsError: None whose instances could be chosen does.
    """
    backends = {engine.backend: engine for engine in ENGINES.values()}
    for model_name, config in configs.items():
        engine = backends.get(config.backend)
        is_lean = model_name == name and config.backend == LEAN_BACKEND
        if is_lean or (engine and "instances" not in engine.idle_options):
            return model_name
    found = sorted({config.backend for config in configs.values() if config.backend})
    raise SettingsError(
        f"{name} cannot be tuned",
        expected="a graph whose copies can be chosen",
        got=f"the backend{'s' if len(found) > 1 else ''} {', '.join(found)}",
        remedy="see how its engine batches by itself",
    )


def list_ways(graph: pb.ModelConfig) -> list[Way]:
    """Return the ways to serve a graph, of which the first is that of its configuration.

    Copies and threads are powers of two, of which no more run than there are cores twice over: with as many as there
    are cores some wait whenever a request is read or written.
    """
    cores = len(os.sched_getaffinity(0))
    powers = [1 << power for power in range(8) if 1 << power <= 2 * cores]
    now = read_way(graph)
    ways = [
        Way(instances=instances, threads=threads, max_queue_delay_microseconds=delay)
        for instances, threads, delay in itertools.product(
            powers, powers if _find_threads_parameter(graph) else [None], _DELAYS if _joins(graph) else [None]
        )
        if instances * (threads or 1) <= 2 * cores and (threads or 1) <= cores
    ]
    return [now, *(way for way in ways if way != now)]


def read_way(graph: pb.ModelConfig) -> Way:
    """Return how a configuration says that its graph is served."""
    parameter = _find_threads_parameter(graph)
    return Way(
        instances=sum(group.count for group in graph.instance_group),
        threads=int(graph.parameters[parameter].string_value) if parameter in graph.parameters else None,
        max_queue_delay_microseconds=graph.dynamic_batching.max_queue_delay_microseconds if _joins(graph) else None,
    )


def write_way(graph: pb.ModelConfig, way: Way) -> pb.ModelConfig:
    """Return the configuration under which its graph is served so."""
    changed = pb.ModelConfig()
    changed.CopyFrom(graph)
    for group in changed.instance_group:
        group.count = way.instances
    if way.threads is not None:
        changed.parameters[_find_threads_parameter(graph)].string_value = str(way.threads)
    if way.max_queue_delay_microseconds is not None:
        changed.dynamic_batching.max_queue_delay_microseconds = way.max_queue_delay_microseconds
    return changed


def _find_threads_parameter(graph: pb.ModelConfig) -> str:
    """Return the parameter that says how many threads a copy has; empty where none does."""
    if graph.backend == LEAN_BACKEND:
        return LEAN_THREADS_PARAMETER
    return next((each.threads_parameter for each in ENGINES.values() if each.backend == graph.backend), "")


def _joins(graph: pb.ModelConfig) -> bool:
    """Tell whether requests are joined, for which it may wait; the lean step takes one at a time."""
    return graph.HasField("dynamic_batching") and 1 not in graph.dynamic_batching.preferred_batch_size
