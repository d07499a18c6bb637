"""Rules on batching, queues and instances (Triton's core, model_config_utils.cc)."""

from collections.abc import Iterator

from tritonclient.grpc import model_config_pb2 as pb

from ..option_kinds import MAX_WORKERS
from .finding import Problem
from .model import Model, Repository


def check_max_batch_size(model: Model, _: Repository) -> Iterator[Problem]:
    """Find a negative batch."""
    size = model.config.max_batch_size
    if size < 0:
        what = f"max_batch_size is {size}"
        instead = "write `max_batch_size: 0` for a model without batches"
        yield Problem(path=model.config_path, line=model.line("max_batch_size"), what=what, instead=instead)


def check_preferred_sizes(model: Model, _: Repository) -> Iterator[Problem]:
    """Find preferred batches that cannot be."""
    most = model.config.max_batch_size
    for field, inner in (("dynamic_batching", ()), ("sequence_batching", ("oldest",))):
        batching = getattr(model.config, field)
        for name in inner:
            batching = getattr(batching, name)
        for index, size in enumerate(batching.preferred_batch_size):
            if not 0 < size <= most:
                yield Problem(
                    path=model.config_path,
                    line=model.line(field, *inner, "preferred_batch_size", index),
                    what=f"a batch of {size} is preferred where max_batch_size is {most}",
                    instead=f"write `preferred_batch_size: [ {max(most, 1)} ]`, or a larger max_batch_size",
                )


def check_priorities(model: Model, _: Repository) -> Iterator[Problem]:
    """Find priorities outside of the levels that there are."""
    batching = model.config.dynamic_batching
    levels = batching.priority_levels
    if levels and not 1 <= batching.default_priority_level <= levels:
        yield Problem(
            path=model.config_path,
            line=model.line("dynamic_batching", "default_priority_level"),
            what=f"default_priority_level is {batching.default_priority_level} of {levels} levels",
            instead=f"write `default_priority_level: {levels}`, or one from 1 on",
        )
    for level in batching.priority_queue_policy if levels else ():
        if not 1 <= level <= levels:
            yield Problem(
                path=model.config_path,
                line=model.line("dynamic_batching", "priority_queue_policy", f"={level}"),
                what=f"there is a policy for level {level} of {levels} levels",
                instead=f"write `key: {levels}`, or one from 1 on",
            )


def check_unused_priorities(model: Model, _: Repository) -> Iterator[Problem]:
    """Find priorities where there are no levels."""
    batching = model.config.dynamic_batching
    if not batching.priority_levels and (batching.default_priority_level or batching.priority_queue_policy):
        field = "default_priority_level" if batching.default_priority_level else "priority_queue_policy"
        yield Problem(
            path=model.config_path,
            line=model.line("dynamic_batching", field),
            what=f"{field} has no effect without priority_levels",
            instead="write `priority_levels: 2`, or remove it",
        )


def check_order(model: Model, _: Repository) -> Iterator[Problem]:
    """Find an order that cannot be kept."""
    batching = model.config.dynamic_batching
    policies = [batching.default_queue_policy, *batching.priority_queue_policy.values()]
    delays = any(p.default_timeout_microseconds and p.timeout_action == pb.ModelQueuePolicy.DELAY for p in policies)
    if batching.preserve_ordering and (batching.priority_levels > 1 or delays):
        yield Problem(
            path=model.config_path,
            line=model.line("dynamic_batching", "preserve_ordering"),
            what="the order cannot be kept among several priorities, or where late requests are delayed",
            instead="write `preserve_ordering: false`",
        )


def check_batching_has_batch(model: Model, _: Repository) -> Iterator[Problem]:
    """Find batching where there are no batches."""
    if model.config.HasField("dynamic_batching") and model.config.max_batch_size == 0 and model.text is not None:
        yield Problem(
            path=model.config_path,
            line=model.line("dynamic_batching"),
            what="dynamic_batching joins nothing where max_batch_size is 0",
            instead="write `max_batch_size: 8`, or remove `dynamic_batching`",
        )


def check_cache(model: Model, _: Repository) -> Iterator[Problem]:
    """Find a cache of what Triton does not cache."""
    config = model.config
    streams = config.model_transaction_policy.decoupled
    if config.response_cache.enable and (streams or config.HasField("sequence_batching")):
        yield Problem(
            path=model.config_path,
            line=model.line("response_cache"),
            what=f"answers of a {'decoupled' if streams else 'sequence'} model cannot be cached",
            instead="remove `response_cache`",
        )


def check_gpus(model: Model, _: Repository) -> Iterator[Problem]:
    """Find GPUs of instances that are not on one."""
    for index, group in enumerate(model.config.instance_group):
        if group.gpus and group.kind in (pb.ModelInstanceGroup.KIND_CPU, pb.ModelInstanceGroup.KIND_MODEL):
            kind = pb.ModelInstanceGroup.Kind.Name(group.kind)
            yield Problem(
                path=model.config_path,
                line=model.line("instance_group", index, "gpus"),
                what=f"an instance of {kind} has GPUs {list(group.gpus)}",
                instead="write `kind: KIND_GPU`, or remove `gpus`",
            )


def check_count(model: Model, _: Repository) -> Iterator[Problem]:
    """Find groups of no instances."""
    for index, group in enumerate(model.config.instance_group):
        written = model.source.find_all("instance_group")
        said = [child for node in written[index : index + 1] for child in node.find_all("count")]
        if said and group.count < 1:
            yield Problem(
                path=model.config_path,
                line=said[0].line,
                what=f"a group has {group.count} instances, of which Triton makes its default",
                instead="write `count: 1`",
            )


def check_many(model: Model, _: Repository) -> Iterator[Problem]:
    """Find more instances than a machine has room for."""
    for index, group in enumerate(model.config.instance_group):
        if group.count > MAX_WORKERS:
            yield Problem(
                path=model.config_path,
                line=model.line("instance_group", index, "count"),
                what=f"a group has {group.count} instances, each with memory, threads or a process of its own",
                instead=f"write `count: 2`, or at most {MAX_WORKERS}",
            )


def check_profiles(model: Model, _: Repository) -> Iterator[Problem]:
    """Find TensorRT's profiles of models that are not TensorRT's."""
    for index, group in enumerate(model.config.instance_group):
        if group.profile and model.backend not in ("tensorrt", ""):
            yield Problem(
                path=model.config_path,
                line=model.line("instance_group", index, "profile"),
                what=f"the backend {model.backend} has no profiles",
                instead="remove `profile`",
            )
