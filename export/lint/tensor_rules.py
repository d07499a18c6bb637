"""Rules on the inputs and outputs that a configuration declares (Triton's core, model_config_utils.cc)."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from tritonclient.grpc import model_config_pb2 as pb

from .finding import Problem
from .model import Model, Repository


def check_tensors(model: Model, _: Repository) -> Iterator[Problem]:
    """Find tensors that Triton refuses whatever the model is."""
    for kind, tensors in (("input", model.config.input), ("output", model.config.output)):
        for index, tensor in enumerate(tensors):
            for field, what, instead in _judge(kind, tensor, model.config.max_batch_size):
                line = model.line(kind, index, field)
                yield Problem(path=model.config_path, line=line, what=what, instead=instead)


def check_reshapes(model: Model, _: Repository) -> Iterator[Problem]:
    """Find reshapes that would change the number of elements."""
    for kind, tensors in (("input", model.config.input), ("output", model.config.output)):
        for index, tensor in enumerate(tensors):
            shape = list(tensor.reshape.shape)
            if tensor.HasField("reshape") and not _has_same_size(list(tensor.dims), shape):
                yield Problem(
                    path=model.config_path,
                    line=model.line(kind, index, "reshape"),
                    what=f"the {kind} {tensor.name} of dims {list(tensor.dims)} cannot be reshaped to {shape}",
                    instead="write a shape with as many elements, and -1 as often",
                )


def check_unique(model: Model, _: Repository) -> Iterator[Problem]:
    """Find a name that two inputs or two outputs have."""
    for kind, tensors in (("input", model.config.input), ("output", model.config.output)):
        for name, count in Counter(tensor.name for tensor in tensors).items():
            if name and count > 1:
                last = max(index for index, tensor in enumerate(tensors) if tensor.name == name)
                yield Problem(
                    path=model.config_path,
                    line=model.line(kind, last, "name"),
                    what=f"{count} {kind}s are called {name}",
                    instead="give each its own name",
                )


def check_labels(model: Model, _: Repository) -> Iterator[Problem]:
    """Find files of labels that are not there."""
    for index, tensor in enumerate(model.config.output):
        if tensor.label_filename and not (model.folder / tensor.label_filename).is_file():
            yield Problem(
                path=model.config_path,
                line=model.line("output", index, "label_filename"),
                what=f"the labels of {tensor.name} are not in {model.folder / tensor.label_filename}",
                instead="put the file there, one label a line, or remove `label_filename`",
            )


def _judge(kind: str, tensor: pb.ModelInput | pb.ModelOutput, max_batch_size: int) -> Iterator[tuple[str, str, str]]:
    if not tensor.name:
        yield "name", f"an {kind} has no name", 'write `name: "..."`'
    if tensor.data_type == pb.TYPE_INVALID:
        yield "data_type", f"the {kind} {tensor.name} has no data_type", "write `data_type: TYPE_FP32`, or another type"
    if not tensor.dims:
        yield "dims", f"the {kind} {tensor.name} has no dims", "write `dims: [ -1 ]`, without the batch"
    if wrong := [dim for dim in tensor.dims if dim < 1 and dim != -1]:
        text = f"the {kind} {tensor.name} has a dimension of {wrong[0]}"
        yield "dims", text, "write `-1` for a size that varies"
    if tensor.HasField("reshape") and not tensor.reshape.shape and max_batch_size == 0:
        text = f"the {kind} {tensor.name} is reshaped to a scalar, which only a model with batches can be"
        yield "reshape", text, "remove `reshape`"


def _has_same_size(dims: Sequence[int], shape: Sequence[int]) -> bool:
    return _count_between(dims) == _count_between(shape)


def _count_between(dims: Sequence[int]) -> list[int]:
    """Return the number of elements of each run of dimensions between those that vary."""
    runs: list[list[int]] = [[]]
    for dim in dims:
        if dim == -1:
            runs.append([])
        else:
            runs[-1].append(dim)
    return [math.prod(run) for run in runs]
