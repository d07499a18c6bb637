"""vLLM in NVIDIA's image: text from a decoder on GPUs, by weights and an engine that are not ours."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from ..errors import EngineError
from ..targets import find_target
from .engine import Engine, Runner
from .vllm_arguments import ARGUMENTS_FILE, render_arguments

if TYPE_CHECKING:
    from tritonclient.grpc import model_config_pb2 as pb

    from ..targets import Target

# Since then the backend gives finish reasons and numbers of tokens (its docs/additional_outputs.md).
_FIRST_RELEASE = "24.12"

# Precision → the type of the weights, as vLLM names it.
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}

# What the backend has beside the tensors that the CPU's has too, with its own types (vllm_backend, src/model.py at
# 00ea75b); its server completes no configuration that says everything.
_FURTHER_INPUTS = (
    ("image", "TYPE_STRING", -1),
    ("return_cumulative_logprob", "TYPE_BOOL", 1),
    ("return_logprobs", "TYPE_BOOL", 1),
    ("embedding_request", "TYPE_STRING", 1),
)
_FURTHER_OUTPUTS = (("cumulative_logprob", "TYPE_FP32", -1), ("logprobs", "TYPE_STRING", -1))


class VLLM(Engine):
    """Publishes what Triton's vLLM backend loads. Nothing of it runs here."""

    name = "vllm"
    title = "vLLM"
    help = "text generation on GPUs, in NVIDIA's vLLM image"
    backend = "vllm"
    model_file = "config.json"
    graph_precisions: ClassVar[Mapping[str, str]] = {name: name for name in DTYPES}
    # vLLM queues and batches by itself, in one process, and answers in pieces.
    idle_options = frozenset({"instances", "max_queue_size", "response_cache", "rate_limit"})
    elsewhere = "MODELYARD_MODEL=NAME docker compose --profile vllm up server-vllm"
    takes = "decoder"

    def check(self, precision: str, target: "Target") -> None:
        """See `Engine`. Nothing of it is needed here."""
        self.check_names(precision, target)

    def check_names(self, precision: str, target: "Target") -> None:
        """See `Engine`."""
        super().check_names(precision, target)
        if target.release < find_target(_FIRST_RELEASE).release:
            raise EngineError(
                f"the vLLM backend of Triton {target.release} lacks what clients ask for",
                expected=f"a release from {_FIRST_RELEASE} on",
                got=target.release,
                remedy="pass the release of the image that is to serve it as --target",
            )

    def open(self, path: Path, target: "Target") -> AbstractContextManager[Runner]:
        """See `Engine`; weights are compared as bytes, and nothing is run."""
        raise AssertionError("Bug: vLLM does not run here")

    def list_version_files(self, name: str, version: int, *, precision: str, context: int) -> Mapping[str, str]:
        """See `Engine`; vLLM takes the whole path of the weights."""
        arguments = {"dtype": DTYPES[precision], "max_model_len": context}
        return {ARGUMENTS_FILE: render_arguments(name, version, arguments)}

    def configure(self, config: "pb.ModelConfig") -> None:
        """See `Engine`. The backend reads `model.json` beside the weights, and leaves GPUs to vLLM."""
        from tritonclient.grpc import model_config_pb2 as pb

        config.ClearField("default_model_filename")
        config.model_transaction_policy.decoupled = True
        config.instance_group.add(kind=pb.ModelInstanceGroup.KIND_MODEL, count=1)
        for name, kind, size in _FURTHER_INPUTS:
            config.input.add(name=name, data_type=kind, dims=[size], optional=True)
        for name, kind, size in _FURTHER_OUTPUTS:
            config.output.add(name=name, data_type=kind, dims=[size])
