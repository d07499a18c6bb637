"""The `config.pbtxt` of each model in the ensemble, complete, so that the server has nothing to guess.

Written through Triton's own protobuf messages: a field that does not exist cannot be written.
"""

from collections.abc import Iterable, Mapping

import torch
from tritonclient.grpc import model_config_pb2 as pb

from ..engines.limits import INSTANCES, INTRA_OP_THREADS, LEAN_BACKEND, LEAN_THREADS_PARAMETER, MAX_BATCH_SIZE
from ..engines.table import ONNXRUNTIME, Engine
from ..serving_options import ServingOptions
from ..signature import BATCH, ROW_SHAPES, STRING, Contract, ModelSignature, TensorSignature
from . import intent
from .names import OWNER_PARAMETER, ModelNames

# Requests that may wait in front of one step, eight full batches of one row each; beyond it the server answers 503 /
# UNAVAILABLE at once. With four times as many, answers took five times as long and 70 MB instead of 18.
MAX_QUEUE_SIZE = 8 * MAX_BATCH_SIZE

# Where a queue is bounded, tritonserver 2.51 gives work to an instance only once it sees it wait, and it looks as a
# request comes, as one is done, a moment too early, and after half a second (`WaitForPayloadSlotAvailable` in its
# dynamic_batch_scheduler.cc). Of a hundred requests that came at once, one in half a second was answered by a step of
# one instance, and bursts took up to 2 s with two and none of that with three. So the last step has no bound.
_TEXT_INSTANCES = 3

# A short wait joins files that arrive together; the model runs for milliseconds, and while it does requests gather by
# themselves.
PREPROCESS_QUEUE_DELAY_MICROSECONDS = 200

# What the preprocess step pads requests to; the dynamic batcher joins those of one length.
LENGTHS_PARAMETER = "modelyard_lengths"
UNKNOWN_PARAMETER = "modelyard_unknown_id"

# Nothing asked for.
DEFAULT_SERVING = ServingOptions()

_TRITON_DTYPES = {
    torch.bool: pb.TYPE_BOOL,
    torch.uint8: pb.TYPE_UINT8,
    torch.int8: pb.TYPE_INT8,
    torch.int16: pb.TYPE_INT16,
    torch.int32: pb.TYPE_INT32,
    torch.int64: pb.TYPE_INT64,
    torch.uint32: pb.TYPE_UINT32,
    torch.float16: pb.TYPE_FP16,
    torch.float32: pb.TYPE_FP32,
    torch.float64: pb.TYPE_FP64,
    STRING: pb.TYPE_STRING,
}


def name_models(name: str, signature: ModelSignature) -> ModelNames:
    """Return the names that a publication of a graph with this signature has."""
    contract = signature.contract
    if contract is None or contract.preprocess is None or contract.is_lean:
        return ModelNames(name=name, is_ensemble=False)
    return ModelNames(name=name, has_postprocess=contract.postprocess is not None)


def build_configs(
    names: ModelNames,
    signature: ModelSignature,
    *,
    version: int,
    served: Iterable[int],
    engine: Engine = ONNXRUNTIME,
    serving: ServingOptions = DEFAULT_SERVING,
    has_warmup: bool = True,
) -> Mapping[str, pb.ModelConfig]:
    """Return model name → configuration, steps first, the ensemble last.

    Args:
        names: Names of the model, and of the ensemble around it where there is one.
        signature: Tensors of the ONNX file.
        version: Version that the ensemble's steps are pinned to.
        served: Versions that the steps serve; more than one only while a new version replaces an old one.
        engine: What runs the model.
        serving: How it is to be served.
        has_warmup: Whether the graph runs with zeros, so that instances can be warmed up with them.
    """
    served = sorted(set(served))
    contract = signature.contract
    if contract is not None and contract.is_lean:
        configs = {names.name: _build_lean(names.name, contract, served, engine)}
    else:
        configs = {names.model: _build_model(names.model, signature.served, served, engine, version)}
        warmups = signature.served.list_warmups(serving.warmup) if has_warmup else {}
        configs[names.model].model_warmup.extend(_warmup(*each, signature.served) for each in warmups.items())
    if contract is not None and names.is_ensemble:
        configs = {names.preprocess: _build_preprocess(names.preprocess, signature, contract, served), **configs}
        if contract.postprocess is not None:
            configs[names.postprocess] = _build_postprocess(names.postprocess, signature, contract, served)
        configs[names.name] = _build_ensemble(names, signature, contract, version)
    intent.apply(serving, configs, names, engine, signature)
    for config in configs.values():
        config.parameters[OWNER_PARAMETER].string_value = names.name
    return configs


def _build_preprocess(name: str, signature: ModelSignature, contract: Contract, served: list[int]) -> pb.ModelConfig:
    config = pb.ModelConfig(
        name=name,
        backend=contract.preprocess,
        max_batch_size=MAX_BATCH_SIZE,
        version_policy=_serve(served),
        input=[_input(tensor) for tensor in contract.inputs],
        output=[_output(tensor) for tensor in signature.inputs + contract.carried],
        # One that is held by a text of a tenth of a second leaves the others to the others. Each spreads its batch over
        # its share of the cores.
        instance_group=[
            pb.ModelInstanceGroup(
                kind=pb.ModelInstanceGroup.KIND_CPU, count=INSTANCES if contract.has_files else _TEXT_INSTANCES
            )
        ],
        # Pictures of several requests are decoded on all cores.
        dynamic_batching=_batching(PREPROCESS_QUEUE_DELAY_MICROSECONDS) if contract.has_files else _one_by_one(),
    )
    if contract.lengths:
        config.parameters[LENGTHS_PARAMETER].string_value = ",".join(map(str, contract.lengths))
    _set_unknown(config, contract)
    return config


def _set_unknown(config: pb.ModelConfig, contract: Contract) -> None:
    if contract.unknown_id is not None:
        config.parameters[UNKNOWN_PARAMETER].string_value = str(contract.unknown_id)


def _build_postprocess(name: str, signature: ModelSignature, contract: Contract, served: list[int]) -> pb.ModelConfig:
    return pb.ModelConfig(
        name=name,
        backend=contract.postprocess,
        max_batch_size=MAX_BATCH_SIZE,
        version_policy=_serve(served),
        input=[_input(tensor) for tensor in signature.outputs + contract.passed],
        output=[_output(tensor) for tensor in contract.outputs],
        instance_group=[pb.ModelInstanceGroup(kind=pb.ModelInstanceGroup.KIND_CPU, count=1)],
        # Without a queue of its own, each request is run alone. The steps before it bound how many there can be.
        dynamic_batching=pb.ModelDynamicBatching() if contract.has_files else None,
    )


def _build_model(
    name: str,
    signature: ModelSignature,
    served: list[int],
    engine: Engine,
    version: int,
) -> pb.ModelConfig:
    config = pb.ModelConfig(
        name=name,
        backend=engine.backend,
        max_batch_size=MAX_BATCH_SIZE if signature.is_batched else 0,
        default_model_filename=engine.model_file,
        version_policy=_serve(served),
        input=[_input(tensor, is_batched=signature.is_batched) for tensor in signature.inputs],
        output=[_output(tensor, is_batched=signature.is_batched, version=version) for tensor in signature.outputs],
    )
    if signature.is_batched:
        config.dynamic_batching.CopyFrom(_batching(0))
    if signature.is_ragged:
        _join_any_lengths(config)
    engine.configure(config)
    return config


def _join_any_lengths(config: pb.ModelConfig) -> None:
    """Have requests of any lengths joined, for a graph that takes rows one behind another and their shapes."""
    for tensor in config.input:
        tensor.allow_ragged_batch = True
    config.batch_input.add(
        kind=pb.BatchInput.BATCH_ITEM_SHAPE,
        target_name=[ROW_SHAPES],
        data_type=pb.TYPE_INT32,
        source_input=[config.input[0].name],
    )


def _build_lean(name: str, contract: Contract, served: list[int], engine: Engine) -> pb.ModelConfig:
    config = pb.ModelConfig(
        name=name,
        backend=LEAN_BACKEND,
        max_batch_size=MAX_BATCH_SIZE,
        default_model_filename=engine.model_file,
        version_policy=_serve(served),
        input=[_input(tensor) for tensor in contract.inputs],
        output=[_output(tensor) for tensor in contract.outputs],
        instance_group=[pb.ModelInstanceGroup(kind=pb.ModelInstanceGroup.KIND_CPU, count=INSTANCES)],
        # Nothing is gained by joining rows that run one after another, and a free instance takes the next request.
        dynamic_batching=_one_by_one(),
    )
    config.parameters[LEAN_THREADS_PARAMETER].string_value = str(INTRA_OP_THREADS)
    _set_unknown(config, contract)
    return config


def _build_ensemble(names: ModelNames, signature: ModelSignature, contract: Contract, version: int) -> pb.ModelConfig:
    asked, answered, carried = map(_same_names, (contract.inputs, contract.outputs, contract.carried))
    passed = _same_names(contract.passed)
    inputs = _same_names(signature.inputs)
    # Without a postprocess step the graph's outputs are the answers, under the names that clients use.
    named = contract.outputs if contract.postprocess is None else signature.outputs
    outputs = {tensor.name: other.name for tensor, other in zip(signature.outputs, named, strict=True)}
    steps = [
        pb.ModelEnsembling.Step(
            model_name=names.preprocess, model_version=version, input_map=asked, output_map=inputs | carried
        ),
        pb.ModelEnsembling.Step(model_name=names.model, model_version=version, input_map=inputs, output_map=outputs),
    ]
    if contract.postprocess is not None:
        steps.append(
            pb.ModelEnsembling.Step(
                model_name=names.postprocess,
                model_version=version,
                input_map=outputs | passed,
                output_map=answered,
            )
        )
    return pb.ModelConfig(
        name=names.name,
        platform="ensemble",
        max_batch_size=MAX_BATCH_SIZE,
        version_policy=_serve([version]),
        input=[_input(tensor) for tensor in contract.inputs],
        output=[_output(tensor) for tensor in contract.outputs],
        ensemble_scheduling=pb.ModelEnsembling(step=steps),
    )


def _serve(versions: list[int]) -> pb.ModelVersionPolicy:
    return pb.ModelVersionPolicy(specific=pb.ModelVersionPolicy.Specific(versions=versions))


def _batching(delay_microseconds: int) -> pb.ModelDynamicBatching:
    return pb.ModelDynamicBatching(
        max_queue_delay_microseconds=delay_microseconds,
        default_queue_policy=pb.ModelQueuePolicy(
            timeout_action=pb.ModelQueuePolicy.REJECT, allow_timeout_override=True, max_queue_size=MAX_QUEUE_SIZE
        ),
    )


def _one_by_one() -> pb.ModelDynamicBatching:
    """Return a queue of which each request is run alone, whatever its rows.

    A request whose strings say that they are longer than they are is refused by Triton's Python backend while it
    gathers a batch, and with it the whole batch: everybody whose request was joined with that one
    (`SaveRequestsToSharedMemory` in its python_be.cc).
    """
    batching = _batching(0)
    batching.preferred_batch_size.append(1)
    return batching


def _warmup(label: str, sizes: Mapping[str, int], signature: ModelSignature) -> pb.ModelWarmup:
    """Return a request of one row; symbols that `sizes` does not name have size 1."""
    # Zeros, not random values: a random id lies outside the vocabulary.
    inputs = {
        tensor.name: pb.ModelWarmup.Input(
            data_type=_TRITON_DTYPES[tensor.dtype],
            dims=tensor.resolve_dims(dict.fromkeys(tensor.symbols, 1) | dict(sizes))[1:],
            zero_data=True,
        )
        for tensor in signature.inputs
    }
    return pb.ModelWarmup(name=label, batch_size=1, inputs=inputs)


def _same_names(tensors: Iterable[TensorSignature]) -> dict[str, str]:
    """Return how an ensemble passes on tensors that have one name in and around a step."""
    return {tensor.name: tensor.name for tensor in tensors}


def _input(tensor: TensorSignature, *, is_batched: bool = True) -> pb.ModelInput:
    return pb.ModelInput(
        name=tensor.name,
        data_type=_TRITON_DTYPES[tensor.dtype],
        dims=_dims(tensor, is_batched=is_batched),
        optional=tensor.is_optional,
    )


def _output(tensor: TensorSignature, *, is_batched: bool = True, version: int = 0) -> pb.ModelOutput:
    """Return an output; the file with its labels lies in the folder of `version`, seen from that of the model."""
    return pb.ModelOutput(
        name=tensor.name,
        data_type=_TRITON_DTYPES[tensor.dtype],
        dims=_dims(tensor, is_batched=is_batched),
        label_filename=f"{version}/{tensor.label_file}" if tensor.label_file else "",
    )


def _dims(tensor: TensorSignature, *, is_batched: bool) -> list[int]:
    """Return the dimensions, -1 where symbolic, as Triton counts them: without the batch where it joins requests."""
    has_batch = is_batched and tensor.dims[:1] == (BATCH,)
    return [-1 if isinstance(dim, str) else dim for dim in tensor.dims[has_batch:]]
