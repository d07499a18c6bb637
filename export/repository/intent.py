"""How a version is to be served, written into its configurations; and refused where it would have no effect."""

from collections.abc import Mapping

from tritonclient.grpc import model_config_pb2 as pb

from ..engines.engine import Engine
from ..errors import SettingsError
from ..serving_options import ServingOptions
from ..signature import SEQ_LEN, ModelSignature
from .effect import find_threads_parameter, refuse_idle
from .names import ModelNames

_ACTIONS = {"reject": pb.ModelQueuePolicy.REJECT, "delay": pb.ModelQueuePolicy.DELAY}


def check_effect(serving: ServingOptions, engine: Engine, signature: ModelSignature) -> None:
    """Refuse what would have no effect on a model.

    Args:
        serving: What was asked for.
        engine: What runs the model.
        signature: Tensors of the graph.

    Raises:
        SettingsError: One of them would have none, or a text to warm up with is longer than the model takes.
    """
    has_lengths = SEQ_LEN in signature.longest
    refuse_idle(
        serving, engine, is_lean=_is_lean(signature), is_batched=signature.served.is_batched, has_lengths=has_lengths
    )
    longest = signature.longest.get(SEQ_LEN, 0)
    if has_lengths and max(serving.warmup, default=0) > longest:
        raise SettingsError(
            "--warmup has a text that is longer than the model takes",
            expected=f"up to {longest} tokens",
            got=f"{max(serving.warmup)}",
            remedy="pass a shorter one",
        )


def _is_lean(signature: ModelSignature) -> bool:
    return signature.contract is not None and signature.contract.is_lean


def apply(
    serving: ServingOptions,
    configs: Mapping[str, pb.ModelConfig],
    names: ModelNames,
    engine: Engine,
    signature: ModelSignature,
) -> None:
    """Write what was asked for into the configurations of a version, in place; `check_effect` has let it pass.

    Queues and priorities are those of every step that bounds its queue, which the last does not; copies and resources
    those of the graph; and what is kept in the cache are the answers of the public model, as clients get them.
    """
    for name, config in configs.items():
        if name != names.postprocess and config.HasField("dynamic_batching"):
            _queue(serving, config.dynamic_batching)
    graph = configs[names.model]
    for name in sorted(engine.parameter_options):
        if (value := getattr(serving, name)) is not None:
            graph.parameters[name].string_value = str(value)
    if serving.threads is not None:
        parameter = find_threads_parameter(engine, is_lean=_is_lean(signature))
        graph.parameters[parameter].string_value = str(serving.threads)
    if serving.max_queue_delay_microseconds is not None:
        graph.dynamic_batching.max_queue_delay_microseconds = serving.max_queue_delay_microseconds
    for group in graph.instance_group:
        if serving.instances is not None:
            group.count = serving.instances
        for resource, count in sorted(serving.rate_limit.items()):
            group.rate_limiter.resources.add(name=resource, count=count)
    if serving.response_cache:
        configs[names.name].response_cache.enable = True


def _queue(serving: ServingOptions, batching: pb.ModelDynamicBatching) -> None:
    if serving.prefetch:
        # With any policy tritonserver hands over a request only once an instance waits for one, and no other gets into
        # the queue until then (`support_prefetching_` in scheduler_utils.cc of Triton's core).
        batching.ClearField("default_queue_policy")
        return
    policy = batching.default_queue_policy
    if serving.max_queue_size is not None:
        policy.max_queue_size = serving.max_queue_size
    if serving.default_timeout_microseconds is not None:
        policy.default_timeout_microseconds = serving.default_timeout_microseconds
    if serving.timeout_action is not None:
        policy.timeout_action = _ACTIONS[serving.timeout_action]
    if serving.priority_levels is not None:
        batching.priority_levels = serving.priority_levels
        batching.default_priority_level = serving.default_priority_level or serving.priority_levels
