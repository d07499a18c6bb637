"""Rules on ensembles (Triton's core, model_config_utils.cc and ensemble_utils.cc)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tritonclient.grpc import model_config_pb2 as pb

from .finding import Problem
from .model import Model, Repository
from .words import find_nearest


@dataclass(frozen=True)
class _Use:
    """One model's view of an ensemble's tensor."""

    owner: str
    tensor: pb.ModelInput | pb.ModelOutput
    batched: tuple[bool, ...]
    line: int


def check_form(model: Model, _: Repository) -> Iterator[Problem]:
    """Find what no ensemble may have, and what every one must."""
    config = model.config
    if not model.is_ensemble:
        return
    steps = config.ensemble_scheduling.step
    refused = [field for field in ("instance_group", "model_warmup") if getattr(config, field)]
    refused += ["optimization"] if config.HasField("optimization") else []
    for field in refused:
        what = f"an ensemble has no {field}"
        yield Problem(path=model.config_path, line=model.line(field), what=what, instead="write it in the steps")
    if config.platform != "ensemble":
        yield Problem(
            path=model.config_path,
            line=model.line("platform" if config.platform else "ensemble_scheduling"),
            what="ensemble_scheduling is only for the platform ensemble",
            instead='write `platform: "ensemble"`',
        )
    for index, step in enumerate(steps):
        for field in ("model_name", "input_map", "output_map"):
            if not getattr(step, field):
                yield Problem(
                    path=model.config_path,
                    line=model.line("ensemble_scheduling", "step", index),
                    what=f"the step {step.model_name or index} has no {field}",
                    instead=f"write `{field}`, which every step has",
                )
    if not steps:
        what = "the ensemble has no steps"
        instead = "write `ensemble_scheduling { step [ ... ] }`"
        yield Problem(path=model.config_path, line=model.line("ensemble_scheduling"), what=what, instead=instead)


def check_steps_exist(model: Model, repository: Repository) -> Iterator[Problem]:
    """Find steps whose model, or whose version of it, is not there."""
    for index, step in enumerate(model.config.ensemble_scheduling.step):
        other = repository.models.get(step.model_name)
        line = model.line("ensemble_scheduling", "step", index, "model_name")
        if other is None or not (other.is_model or other.is_inactive):
            near = find_nearest(step.model_name, repository.models)
            yield Problem(
                path=model.config_path,
                line=line,
                what=f"the step {step.model_name} is not in the repository",
                instead=f'write `model_name: "{near}"`' if near else "add the model",
            )
        elif step.model_version > 0 and other.served and step.model_version not in other.served:
            yield Problem(
                path=model.config_path,
                line=model.line("ensemble_scheduling", "step", index, "model_version"),
                what=f"{step.model_name} serves {_list(other.served)}, not version {step.model_version}",
                instead=f"write `model_version: {other.served[-1]}`, or serve that version",
            )


def check_pinned(model: Model, _: Repository) -> Iterator[Problem]:
    """Find steps of which always the newest version is asked."""
    for index, step in enumerate(model.config.ensemble_scheduling.step):
        if step.model_version == -1:
            yield Problem(
                path=model.config_path,
                line=model.line("ensemble_scheduling", "step", index, "model_version"),
                what=f"the step {step.model_name} is not pinned: while versions change, one answer may mix two",
                instead="write the number of the version",
            )


def check_step_tensors(model: Model, repository: Repository) -> Iterator[Problem]:
    """Find mapped tensors that a step does not have."""
    for index, step, other in _list_steps(model, repository):
        for field, mapped, tensors in (
            ("input_map", step.input_map, other.config.input),
            ("output_map", step.output_map, other.config.output),
        ):
            names = [tensor.name for tensor in tensors]
            for name in mapped if names and not _completes_itself(other) else ():
                if name not in names:
                    yield Problem(
                        path=model.config_path,
                        line=model.line("ensemble_scheduling", "step", index, field, f"={name}"),
                        what=f"{step.model_name} has no {field.removesuffix('_map')} {name}: it has {', '.join(names)}",
                        instead=f'write `key: "{find_nearest(name, names) or names[0]}"`',
                    )


def check_step_inputs(model: Model, repository: Repository) -> Iterator[Problem]:
    """Find inputs of a step that it is not given."""
    for index, step, other in _list_steps(model, repository):
        for tensor in other.config.input if not _completes_itself(other) else ():
            if not tensor.optional and tensor.name not in step.input_map:
                yield Problem(
                    path=model.config_path,
                    line=model.line("ensemble_scheduling", "step", index, "input_map"),
                    what=f"the input {tensor.name} of the step {step.model_name} is fed by nothing",
                    instead=f'write `input_map {{ key: "{tensor.name}" value: "..." }}`',
                )


def check_fed(model: Model, _: Repository) -> Iterator[Problem]:
    """Find tensors that nothing makes."""
    made = _list_made(model)
    for index, step in enumerate(model.config.ensemble_scheduling.step):
        for key, tensor in step.input_map.items():
            if tensor not in made:
                yield Problem(
                    path=model.config_path,
                    line=model.line("ensemble_scheduling", "step", index, "input_map", f"={key}"),
                    what=f"nothing makes the tensor {tensor} that the step {step.model_name} takes",
                    instead=f"write one of {', '.join(sorted(made))}",
                )
    for index, output in enumerate(model.config.output if model.is_ensemble else ()):
        if output.name and output.name not in made:
            yield Problem(
                path=model.config_path,
                line=model.line("output", index, "name"),
                what=f"no step makes the output {output.name}",
                instead=f'write `value: "{output.name}"` in the output_map of the step that does',
            )


def check_cycles(model: Model, repository: Repository) -> Iterator[Problem]:
    """Find steps that wait for one another, and ensembles that contain themselves."""
    steps = model.config.ensemble_scheduling.step
    made = _list_made(model)
    # What nothing makes is told elsewhere.
    ready = {tensor.name for tensor in model.config.input} | {
        tensor for step in steps for tensor in step.input_map.values() if tensor not in made
    }
    waiting = list(enumerate(steps))
    while able := [entry for entry in waiting if set(entry[1].input_map.values()) <= ready]:
        ready |= {tensor for _, step in able for tensor in step.output_map.values()}
        waiting = [entry for entry in waiting if entry not in able]
    if waiting:
        index = waiting[0][0]
        yield Problem(
            path=model.config_path,
            line=model.line("ensemble_scheduling", "step", index, "input_map"),
            what=f"the steps {_list([step.model_name for _, step in waiting])} wait for one another",
            instead="feed one of them with an input of the ensemble",
        )
    if model.name in _list_inside(model, repository):
        yield Problem(
            path=model.config_path,
            line=model.line("ensemble_scheduling"),
            what=f"{model.name} contains itself",
            instead="take the step out that leads back to it",
        )


def check_used(model: Model, _: Repository) -> Iterator[Problem]:
    """Find tensors that lead nowhere, which Triton refuses."""
    steps = model.config.ensemble_scheduling.step
    used = {tensor for step in steps for tensor in step.input_map.values()}
    outputs = {tensor.name for tensor in model.config.output}
    for index, tensor in enumerate(model.config.input if model.is_ensemble else ()):
        if tensor.name not in used | outputs:
            yield Problem(
                path=model.config_path,
                line=model.line("input", index, "name"),
                what=f"no step takes the input {tensor.name}",
                instead="remove it, or map it to a step",
            )
    for index, step in enumerate(steps):
        for key, name in step.output_map.items():
            if name not in used | outputs:
                yield Problem(
                    path=model.config_path,
                    line=model.line("ensemble_scheduling", "step", index, "output_map", f"={key}"),
                    what=f"nothing uses the tensor {name} that the step {step.model_name} makes",
                    instead="remove the output_map entry, or declare the tensor as an output",
                )


def check_made_once(model: Model, _: Repository) -> Iterator[Problem]:
    """Find tensors that two steps make."""
    seen: set[str] = set()
    for index, step in enumerate(model.config.ensemble_scheduling.step):
        for key, name in step.output_map.items():
            if name in seen:
                yield Problem(
                    path=model.config_path,
                    line=model.line("ensemble_scheduling", "step", index, "output_map", f"={key}"),
                    what=f"the tensor {name} is made twice",
                    instead="give it another `value`",
                )
            seen.add(name)


def check_types(model: Model, repository: Repository) -> Iterator[Problem]:
    """Find tensors whose maker and taker differ in type."""
    for name, (first, *others) in _collect_uses(model, repository).items():
        for use in others:
            if use.tensor.data_type != first.tensor.data_type:
                one, other = (pb.DataType.Name(each.tensor.data_type) for each in (first, use))
                yield Problem(
                    path=model.config_path,
                    line=use.line,
                    what=f"the tensor {name} is {one} in {first.owner} and {other} in {use.owner}",
                    instead="give both one type, or put a step between them",
                )


def check_shapes(model: Model, repository: Repository) -> Iterator[Problem]:
    """Find tensors whose maker and taker differ in shape."""
    for name, (first, *others) in _collect_uses(model, repository).items():
        for use in others:
            if not _fits(first, use):
                one, other = (list(each.tensor.dims) for each in (first, use))
                yield Problem(
                    path=model.config_path,
                    line=use.line,
                    what=f"the tensor {name} is {one} in {first.owner} and {other} in {use.owner}",
                    instead="give both one shape, -1 where it varies",
                )


def check_batch(model: Model, repository: Repository) -> Iterator[Problem]:
    """Find steps that take smaller batches than the ensemble."""
    largest = model.config.max_batch_size
    for _index, step, other in _list_steps(model, repository):
        if 0 < other.config.max_batch_size < largest and not _completes_itself(other):
            yield Problem(
                path=model.config_path,
                line=model.line("max_batch_size"),
                what=f"the ensemble takes batches of {largest}, its step {step.model_name} only of "
                f"{other.config.max_batch_size}",
                instead=f"write `max_batch_size: {other.config.max_batch_size}`",
            )


def _list_steps(model: Model, repository: Repository) -> Iterator[tuple[int, pb.ModelEnsembling.Step, Model]]:
    for index, step in enumerate(model.config.ensemble_scheduling.step):
        if step.model_name in repository.models:
            yield index, step, repository.models[step.model_name]


def _completes_itself(model: Model) -> bool:
    """Tell whether code of the model may add tensors to what its configuration says."""
    path = model.find_model_file(model.served[-1]) if model.served and model.backend == "python" else None
    return path is not None and path.is_file() and b"auto_complete_config" in path.read_bytes()


def _list_made(model: Model) -> set[str]:
    made = {tensor for step in model.config.ensemble_scheduling.step for tensor in step.output_map.values()}
    return made | {tensor.name for tensor in model.config.input}


def _list_inside(model: Model, repository: Repository) -> set[str]:
    """Return the names of all models that an ensemble leads to."""
    found: set[str] = set()
    waiting = [model]
    while waiting:
        for _, step, other in _list_steps(waiting.pop(), repository):
            if step.model_name not in found:
                found.add(step.model_name)
                waiting.append(other)
    return found


def _collect_uses(model: Model, repository: Repository) -> Mapping[str, list[_Use]]:
    """Return tensor of the ensemble → what each model that has it says of it, as far as configurations tell."""
    uses: dict[str, list[_Use]] = {}
    batched: tuple[bool, ...] = (model.config.max_batch_size > 0,)
    for kind, tensors in (("input", model.config.input), ("output", model.config.output)):
        for index, tensor in enumerate(tensors if model.is_ensemble else ()):
            uses.setdefault(tensor.name, []).append(
                _Use(model.name, _reshaped(tensor), batched, model.line(kind, index))
            )
    for index, step, other in _list_steps(model, repository):
        if _completes_itself(other):
            continue
        says_batch = bool(other.source.find_all("max_batch_size"))
        batched = (other.config.max_batch_size > 0,) if says_batch else (True, False)
        for field, mapped, tensors in (
            ("input_map", step.input_map, other.config.input),
            ("output_map", step.output_map, other.config.output),
        ):
            for tensor in tensors:
                if tensor.name in mapped:
                    line = model.line("ensemble_scheduling", "step", index, field, f"={tensor.name}")
                    uses.setdefault(mapped[tensor.name], []).append(_Use(other.name, tensor, batched, line))
    return uses


def _reshaped(tensor: pb.ModelInput | pb.ModelOutput) -> pb.ModelInput | pb.ModelOutput:
    """Return an ensemble's tensor as its steps see it."""
    if not tensor.HasField("reshape"):
        return tensor
    seen = type(tensor)()
    seen.CopyFrom(tensor)
    seen.ClearField("dims")
    seen.dims.extend(tensor.reshape.shape)
    return seen


def _fits(one: _Use, other: _Use) -> bool:
    if _match(one.tensor.dims, other.tensor.dims):
        return True
    return any(
        _match([*[-1] * first, *one.tensor.dims], [*[-1] * second, *other.tensor.dims])
        for first in one.batched
        for second in other.batched
    )


def _match(one: Sequence[int], other: Sequence[int]) -> bool:
    return len(one) == len(other) and all(a == b or -1 in (a, b) for a, b in zip(one, other, strict=True))


def _list(items: Sequence[object]) -> str:
    return ", ".join(map(str, items)) or "nothing"
