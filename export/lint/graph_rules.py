"""Rules on ONNX files, against the configuration (as the native backend judges it) and against the target."""

from collections.abc import Iterator
from pathlib import Path

from tritonclient.grpc import model_config_pb2 as pb

from .finding import Problem
from .model import Model, Repository
from .onnx_file import Graph
from .words import find_nearest

# What native backends can make a batch_input of.
_BATCH_INPUT_TYPES = ("TYPE_INT32", "TYPE_FP32")


def check_readable(model: Model, _: Repository) -> Iterator[Problem]:
    """Find files that hold no graph."""
    for path, graph in model.graphs.items():
        if isinstance(graph, str):
            yield Problem(path=path, what=f"{path.name} is not an ONNX model: {graph}", instead="export it again")


def check_names(model: Model, _: Repository) -> Iterator[Problem]:
    """Find tensors of the configuration that the graph does not have."""
    for path, graph in _list_graphs(model):
        known = {
            "input": {tensor.name for tensor in graph.inputs} | graph.overridable,
            "output": {tensor.name for tensor in graph.outputs},
        }
        for kind, tensors in (("input", model.config.input), ("output", model.config.output)):
            for index, tensor in enumerate(tensors):
                if tensor.name and tensor.name not in known[kind]:
                    near = find_nearest(tensor.name, known[kind]) or min(known[kind], default="")
                    yield Problem(
                        path=model.config_path,
                        line=model.line(kind, index, "name"),
                        what=f"{_tell(path)} has no {kind} {tensor.name}: it has {', '.join(sorted(known[kind]))}",
                        instead=f'write `name: "{near}"`' if near else "remove it",
                    )


def check_all_inputs(model: Model, _: Repository) -> Iterator[Problem]:
    """Find inputs of the graph that the configuration leaves out."""
    batching = model.config.sequence_batching
    given = {tensor.name for tensor in model.config.input}
    given |= {name for batch in model.config.batch_input for name in batch.target_name}
    given |= {control.name for control in batching.control_input} | {state.input_name for state in batching.state}
    for path, graph in _list_graphs(model):
        missing = [tensor for tensor in graph.inputs if tensor.name not in given]
        for tensor in missing if model.config.input else ():
            dims = (tensor.dims or [-1])[1 if model.config.max_batch_size else 0 :]
            yield Problem(
                path=model.config_path,
                line=model.line("input"),
                what=f"the input {tensor.name} of {_tell(path)} is not declared",
                instead=f'write `input {{ name: "{tensor.name}" data_type: {tensor.dtype} dims: {dims} }}`',
            )


def check_types(model: Model, _: Repository) -> Iterator[Problem]:
    """Find types that differ."""
    for path, graph, kind, index, tensor in _list_pairs(model):
        declared = pb.DataType.Name(tensor.data_type)
        actual = graph[tensor.name].dtype
        if declared not in (actual, "TYPE_INVALID"):
            yield Problem(
                path=model.config_path,
                line=model.line(kind, index, "data_type"),
                what=f"the {kind} {tensor.name} is {actual or 'of a type that Triton lacks'} in {_tell(path)}, "
                f"not {declared}",
                instead=f"write `data_type: {actual}`" if actual else "export it with another type",
            )


def check_dims(model: Model, _: Repository) -> Iterator[Problem]:
    """Find dimensions that differ."""
    batched = model.config.max_batch_size > 0
    for path, graph, kind, index, tensor in _list_pairs(model):
        actual = graph[tensor.name].dims
        is_ragged = kind == "input" and tensor.allow_ragged_batch
        if not actual or is_ragged or (batched and actual[0] != -1):
            continue
        expected = actual[1:] if batched else actual
        field = "reshape" if tensor.HasField("reshape") else "dims"
        declared = list(tensor.reshape.shape if field == "reshape" else tensor.dims)
        fits = len(expected) == len(declared) and all(
            one in (-1, other) for one, other in zip(expected, declared, strict=True)
        )
        if not fits and (declared or field == "reshape"):
            rest = ", of which the first is the batch and not written" if batched else ""
            write = f"dims: {expected}" if field == "dims" else f"reshape {{ shape: {expected} }}"
            yield Problem(
                path=model.config_path,
                line=model.line(kind, index, field),
                what=f"the {kind} {tensor.name} is {actual} in {_tell(path)}{rest}, which {field} {declared} is not",
                instead=f"write `{write}`",
            )


def check_fixed_outputs(model: Model, _: Repository) -> Iterator[Problem]:
    """Find outputs that vary in the graph and are declared with a number."""
    batched = model.config.max_batch_size > 0
    for path, graph, kind, index, tensor in _list_pairs(model):
        actual = graph[tensor.name].dims
        if kind == "input" or not actual or tensor.HasField("reshape"):
            continue
        expected = actual[1:] if batched else actual
        fixed = [dim for dim, other in zip(tensor.dims, expected, strict=False) if other == -1 and dim != -1]
        if len(tensor.dims) == len(expected) and fixed:
            yield Problem(
                path=model.config_path,
                line=model.line(kind, index, "dims"),
                what=f"the output {tensor.name} varies where dims says {fixed[0]}: it is {actual} in {_tell(path)}",
                instead=f"write `dims: {expected}`",
            )


def check_batch(model: Model, _: Repository) -> Iterator[Problem]:
    """Find graphs of a fixed batch in a model that is to batch."""
    if model.config.max_batch_size < 1:
        return
    for path, graph, kind, _index, tensor in _list_pairs(model):
        dims = graph[tensor.name].dims
        is_ragged = kind == "input" and tensor.allow_ragged_batch
        if dims and dims[0] != -1 and not is_ragged:
            yield Problem(
                path=model.config_path,
                line=model.line("max_batch_size"),
                what=f"max_batch_size is {model.config.max_batch_size}, but the {kind} {tensor.name} of {_tell(path)} "
                f"is {dims}, whose first dimension does not vary",
                instead="write `max_batch_size: 0` and whole dims, or export it with a dynamic batch",
            )
            return


def check_ragged(model: Model, _: Repository) -> Iterator[Problem]:
    """Find ragged inputs that the graph does not take as rows one behind another."""
    for path, graph, kind, index, tensor in _list_pairs(model):
        dims = graph[tensor.name].dims
        if isinstance(tensor, pb.ModelInput) and tensor.allow_ragged_batch and dims not in ([], [-1]):
            yield Problem(
                path=model.config_path,
                line=model.line(kind, index, "allow_ragged_batch"),
                what=f"the ragged input {tensor.name} is {dims} in {_tell(path)}, and its rows come one behind "
                "another, [-1]",
                instead="remove `allow_ragged_batch`, or export the graph with `--batching ragged`",
            )


def check_batch_inputs(model: Model, _: Repository) -> Iterator[Problem]:
    """Find inputs that a backend is to make of a batch and cannot, or that the graph takes otherwise."""
    declared = {tensor.name for tensor in model.config.input}
    for index, batch_input in enumerate(model.config.batch_input):
        sources, type_name = list(batch_input.source_input), pb.DataType.Name(batch_input.data_type)
        if len(sources) != 1 or sources[0] not in declared:
            yield Problem(
                path=model.config_path,
                line=model.line("batch_input", index, "source_input"),
                what=f"a batch_input is made of one input, and its source_input is {', '.join(sources) or 'none'}",
                instead=f'write `source_input: [ "{find_nearest("".join(sources), declared) or min(declared)}" ]`'
                if declared
                else "declare the input",
            )
        if type_name not in _BATCH_INPUT_TYPES:
            yield Problem(
                path=model.config_path,
                line=model.line("batch_input", index, "data_type"),
                what=f"a batch_input is {type_name}, and backends make {' or '.join(_BATCH_INPUT_TYPES)}",
                instead=f"write `data_type: {_BATCH_INPUT_TYPES[0]}`",
            )
        for path, graph in _list_graphs(model):
            known = {tensor.name: tensor for tensor in graph.inputs}
            for name in batch_input.target_name:
                if name not in known:
                    yield Problem(
                        path=model.config_path,
                        line=model.line("batch_input", index, "target_name"),
                        what=f"{_tell(path)} has no input {name} for the batch_input",
                        instead=f'write `target_name: [ "{find_nearest(name, known) or min(known, default="")}" ]`',
                    )
                elif type_name in _BATCH_INPUT_TYPES and known[name].dtype != type_name:
                    yield Problem(
                        path=model.config_path,
                        line=model.line("batch_input", index, "data_type"),
                        what=f"the batch_input {name} is {known[name].dtype} in {_tell(path)}, and here {type_name}",
                        instead=f"write `data_type: {known[name].dtype}`, or cast it in the graph",
                    )


def check_opset(model: Model, _: Repository) -> Iterator[Problem]:
    """Find graphs that are newer than the target's ONNX Runtime."""
    for path, graph in _list_graphs(model):
        most = model.target.max_opset
        if graph.opset > most:
            yield Problem(
                path=path,
                what=f"{path.name} is of opset {graph.opset}, and Triton {model.target.release} loads {most} at most",
                instead=f"export it with opset {most}, or pass a later --target",
            )


def check_ir_version(model: Model, _: Repository) -> Iterator[Problem]:
    """Find graphs whose file format is newer than the target's ONNX Runtime."""
    for path, graph in _list_graphs(model):
        most = model.target.max_ir_version
        if graph.ir_version > most:
            yield Problem(
                path=path,
                what=f"{path.name} is of IR version {graph.ir_version}, and Triton {model.target.release} loads {most} "
                "at most",
                instead=f"save it with `ir_version = {most}`",
            )


def check_operators(model: Model, _: Repository) -> Iterator[Problem]:
    """Find operators that nothing defines."""
    for path, graph in _list_graphs(model):
        for domain, operator in graph.foreign.items() if not model.config.model_operations.op_library_filename else ():
            yield Problem(
                path=path,
                what=f"{path.name} uses {operator} of {domain}, which ONNX Runtime does not have",
                instead='write `model_operations { op_library_filename: "..." }`, or export it without',
            )


def check_weights(model: Model, _: Repository) -> Iterator[Problem]:
    """Find weights that are not where the graph says."""
    for path, graph in _list_graphs(model):
        folder = path if path.is_dir() else path.parent
        missing = [name for name in graph.external if not (folder / name).is_file()]
        if missing:
            yield Problem(
                path=path,
                what=f"the weights of {path.name} are not in {folder / missing[0]}",
                instead="copy the file there under that name",
            )


def _list_graphs(model: Model) -> Iterator[tuple[Path, Graph]]:
    for path, graph in model.graphs.items():
        if isinstance(graph, Graph):
            yield path, graph


def _list_pairs(model: Model) -> Iterator[tuple[Path, dict, str, int, pb.ModelInput | pb.ModelOutput]]:  # type: ignore[type-arg]
    """Yield each tensor of the configuration that the graph has: graph's tensors by name, kind, index, tensor."""
    for path, graph in _list_graphs(model):
        for kind, there, tensors in (
            ("input", graph.inputs, model.config.input),
            ("output", graph.outputs, model.config.output),
        ):
            by_name = {tensor.name: tensor for tensor in there}
            for index, tensor in enumerate(tensors):
                if tensor.name in by_name:
                    yield path, by_name, kind, index, tensor


def _tell(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"
