"""The `config.pbtxt` of each model in the ensemble, complete, so that the server has nothing to guess.

Written through Triton's own protobuf messages: a field that does not exist cannot be written.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from export.signature import ModelSignature, TensorSignature

PREPROCESS_BACKEND = "python_preprocess"
MODEL_BACKEND = "onnxruntime"

# Rows in one execution. 32 rows keep the ONNX Runtime busy on every CPU and GPU; a request may bring as many itself.
MAX_BATCH_SIZE = 32

# Requests that may wait in front of one step; beyond it the server answers 503 / UNAVAILABLE at once.
MAX_QUEUE_SIZE = 1024

# The tokenizer runs in microseconds, so under load a short wait joins requests that arrive together; the model runs
# in milliseconds, and while it does requests gather by themselves.
PREPROCESS_QUEUE_DELAY_MICROSECONDS = 200

# Two single-threaded sessions answer more on two cores than one session with two threads, and long texts in one of
# them do not hold up the other.
MODEL_INSTANCES = 2
INTRA_OP_THREADS = 1

_TRITON_DTYPES = {torch.int64: pb.TYPE_INT64, torch.float32: pb.TYPE_FP32}

# Contract names, in clients' eyes; inside the ensemble the graph's own names are used.
TEXT_INPUT = "TEXT"
EMBEDDING_OUTPUT = "EMBEDDING"


@dataclass(frozen=True, kw_only=True)
class EnsembleNames:
    """The names under which one published model appears in the repository."""

    ensemble: str

    @property
    def preprocess(self) -> str:
        """The step that makes token ids of texts."""
        return f"{self.ensemble}_preprocess"

    @property
    def model(self) -> str:
        """The step that runs the ONNX file."""
        return f"{self.ensemble}_model"

    @property
    def all(self) -> tuple[str, ...]:
        """Every name, steps first, the ensemble last."""
        return (self.preprocess, self.model, self.ensemble)


def build_configs(
    names: EnsembleNames, signature: ModelSignature, *, version: int, served: Iterable[int]
) -> Mapping[str, pb.ModelConfig]:
    """Return model name → configuration, steps first, the ensemble last.

    Args:
        names: Of the ensemble and its steps.
        signature: Of the ONNX file.
        version: That the ensemble's steps are pinned to.
        served: Versions that the steps serve; more than one only while a new version replaces an old one.
    """
    served = sorted(set(served))
    return {
        names.preprocess: _build_preprocess(names.preprocess, signature, served),
        names.model: _build_model(names.model, signature, served),
        names.ensemble: _build_ensemble(names, signature, version),
    }


def render_config(config: pb.ModelConfig) -> str:
    """Return the text of a `config.pbtxt`."""
    text: str = text_format.MessageToString(config, indent=0)
    return text


def parse_config(text: str) -> pb.ModelConfig:
    """Return the configuration in the text of a `config.pbtxt`.

    Raises:
        google.protobuf.text_format.ParseError: It is none.
    """
    return text_format.Parse(text, pb.ModelConfig())


def _build_preprocess(name: str, signature: ModelSignature, served: list[int]) -> pb.ModelConfig:
    return pb.ModelConfig(
        name=name,
        backend=PREPROCESS_BACKEND,
        max_batch_size=MAX_BATCH_SIZE,
        version_policy=_serve(served),
        input=[pb.ModelInput(name=TEXT_INPUT, data_type=pb.TYPE_STRING, dims=[1])],
        output=[_output(tensor) for tensor in signature.inputs],
        # tokenizers spreads one batch over all cores by itself.
        instance_group=[pb.ModelInstanceGroup(kind=pb.ModelInstanceGroup.KIND_CPU, count=1)],
        dynamic_batching=_batching(PREPROCESS_QUEUE_DELAY_MICROSECONDS),
    )


def _build_model(name: str, signature: ModelSignature, served: list[int]) -> pb.ModelConfig:
    config = pb.ModelConfig(
        name=name,
        backend=MODEL_BACKEND,
        max_batch_size=MAX_BATCH_SIZE,
        default_model_filename="model.onnx",
        version_policy=_serve(served),
        input=[pb.ModelInput(name=t.name, data_type=_TRITON_DTYPES[t.dtype], dims=_dims(t)) for t in signature.inputs],
        output=[_output(tensor) for tensor in signature.outputs],
        instance_group=[pb.ModelInstanceGroup(kind=pb.ModelInstanceGroup.KIND_AUTO, count=MODEL_INSTANCES)],
        dynamic_batching=_batching(0),
        model_warmup=[_warmup("shortest", 1, signature), _warmup("longest", signature.max_length, signature)],
    )
    config.parameters["intra_op_thread_count"].string_value = str(INTRA_OP_THREADS)
    return config


def _build_ensemble(names: EnsembleNames, signature: ModelSignature, version: int) -> pb.ModelConfig:
    output = signature.outputs[0]
    preprocess = pb.ModelEnsembling.Step(
        model_name=names.preprocess,
        model_version=version,
        input_map={TEXT_INPUT: TEXT_INPUT},
        output_map={tensor.name: tensor.name for tensor in signature.inputs},
    )
    model = pb.ModelEnsembling.Step(
        model_name=names.model,
        model_version=version,
        input_map={tensor.name: tensor.name for tensor in signature.inputs},
        output_map={output.name: EMBEDDING_OUTPUT},
    )
    return pb.ModelConfig(
        name=names.ensemble,
        platform="ensemble",
        max_batch_size=MAX_BATCH_SIZE,
        version_policy=_serve([version]),
        input=[pb.ModelInput(name=TEXT_INPUT, data_type=pb.TYPE_STRING, dims=[1])],
        output=[pb.ModelOutput(name=EMBEDDING_OUTPUT, data_type=_TRITON_DTYPES[output.dtype], dims=_dims(output))],
        ensemble_scheduling=pb.ModelEnsembling(step=[preprocess, model]),
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


def _warmup(label: str, seq_len: int, signature: ModelSignature) -> pb.ModelWarmup:
    # Zeros, not random values: a random id lies outside the vocabulary.
    inputs = {
        tensor.name: pb.ModelWarmup.Input(data_type=_TRITON_DTYPES[tensor.dtype], dims=[seq_len], zero_data=True)
        for tensor in signature.inputs
    }
    return pb.ModelWarmup(name=f"{label}, {seq_len} tokens", batch_size=1, inputs=inputs)


def _output(tensor: TensorSignature) -> pb.ModelOutput:
    return pb.ModelOutput(name=tensor.name, data_type=_TRITON_DTYPES[tensor.dtype], dims=_dims(tensor))


def _dims(tensor: TensorSignature) -> list[int]:
    """Return the dimensions without the batch, -1 where symbolic, as Triton counts them."""
    return [-1 if isinstance(dim, str) else dim for dim in tensor.dims[1:]]
