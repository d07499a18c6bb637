"""Rules on warmup, some of which tritonserver 2.51 does not survive."""

from collections.abc import Iterator

from tritonclient.grpc import model_config_pb2 as pb

from .finding import Problem
from .model import Model, Repository


def check_inputs(model: Model, _: Repository) -> Iterator[Problem]:
    """Find inputs that the model does not have."""
    names = [tensor.name for tensor in model.config.input]
    for index, warmup in enumerate(model.config.model_warmup if names else ()):
        for name in warmup.inputs:
            if name not in names:
                yield Problem(
                    path=model.config_path,
                    line=model.line("model_warmup", index, "inputs", f"={name}"),
                    what=f"the warmup has an input {name}, the model only {', '.join(names)}",
                    instead=f'write `key: "{names[0]}"`',
                )


def check_missing_inputs(model: Model, _: Repository) -> Iterator[Problem]:
    """Find inputs that the warmup leaves out."""
    for index, warmup in enumerate(model.config.model_warmup):
        for tensor in model.config.input:
            if warmup.batch_size and not tensor.optional and tensor.name not in warmup.inputs:
                yield Problem(
                    path=model.config_path,
                    line=model.line("model_warmup", index),
                    what=f"the warmup has no input {tensor.name}",
                    instead=f'write `inputs {{ key: "{tensor.name}" value {{ ... }} }}`',
                )


def check_dims(model: Model, _: Repository) -> Iterator[Problem]:
    """Find sizes that no tensor can have."""
    for index, warmup in enumerate(model.config.model_warmup):
        for name, tensor in warmup.inputs.items():
            if any(dim < 0 for dim in tensor.dims):
                yield Problem(
                    path=model.config_path,
                    line=model.line("model_warmup", index, "inputs", f"={name}", "value", "dims"),
                    what=f"the warmup's input {name} has dims {list(tensor.dims)}, which must be numbers here",
                    instead=f"write `dims: {[dim if dim >= 0 else 1 for dim in tensor.dims]}`",
                )


def check_types(model: Model, _: Repository) -> Iterator[Problem]:
    """Find inputs of another type than the model's."""
    types = {tensor.name: tensor.data_type for tensor in model.config.input}
    for index, warmup in enumerate(model.config.model_warmup):
        for name, tensor in warmup.inputs.items():
            if types.get(name, tensor.data_type) != tensor.data_type:
                yield Problem(
                    path=model.config_path,
                    line=model.line("model_warmup", index, "inputs", f"={name}", "value", "data_type"),
                    what=f"the warmup's input {name} is not of the model's type",
                    instead=f"write `data_type: {pb.DataType.Name(types[name])}`",
                )


def check_files(model: Model, _: Repository) -> Iterator[Problem]:
    """Find data that is not there."""
    for index, warmup in enumerate(model.config.model_warmup):
        for name, tensor in warmup.inputs.items():
            file = model.folder / "warmup" / tensor.input_data_file
            if warmup.batch_size and tensor.input_data_file and not file.is_file():
                yield Problem(
                    path=model.config_path,
                    line=model.line("model_warmup", index, "inputs", f"={name}", "value", "input_data_file"),
                    what=f"the warmup's data is not in {file}",
                    instead="put it there, or write `zero_data: true`",
                )


def check_batch(model: Model, _: Repository) -> Iterator[Problem]:
    """Find warmups that are skipped."""
    for index, warmup in enumerate(model.config.model_warmup):
        if warmup.batch_size == 0:
            yield Problem(
                path=model.config_path,
                line=model.line("model_warmup", index),
                what="a warmup without batch_size is skipped",
                instead="write `batch_size: 1`",
            )
