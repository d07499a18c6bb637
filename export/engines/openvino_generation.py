"""OpenVINO GenAI: text from a decoder on CPUs, with requests that join while others are being answered."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import EngineError
from .engine import Engine, Runner

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedModel
    from tritonclient.grpc import model_config_pb2 as pb

    from ..graph.files import Feed
    from ..targets import Target

# What the backend is told; docs/generation.md says what each is for. The pool is taken in blocks as it is needed.
PARAMETERS = {
    "kv_cache_mb": "1024",
    "max_num_seqs": "64",
    "max_num_batched_tokens": "256",
    "dynamic_split_fuse": "auto",
    "max_queue_size": "128",
}

# Precision → how it is computed and how keys and values are kept. Left to itself OpenVINO computes in bfloat16 where
# the CPU can, and keeps them in 8 bits.
PROPERTIES = {
    "fp32": {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"},
    "bf16": {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "u8"},
    # Nor are activations made bytes of, which only some CPUs would do.
    "int8": {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "u8", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"},
}

# They lie beside the model: two versions of a rollout share one configuration.
PROPERTIES_FILE = "properties.json"

# What the backend reads there: the tokens that end a text, and what holds where a request does not say.
GENERATION_FILE = "generation.json"

# Output name → the pieces, in parts of the sequence, in which a sequence is fed for it.
_PIECES = {"logits": (1.0,), "logits_with_past": (0.5, 0.75, 1.0)}

# What a pool is counted in on CPUs (openvino-genai 2026.4).
BLOCK_TOKENS = 32

# Precision → bytes of one value in it, and of scale and zero for the values of a token in one head.
VALUE_BYTES = {"fp32": (4, 0), "bf16": (1, 8), "int8": (1, 8)}

# A version must hold a recorded prompt with its text, as must the one that comes after it in a rollout.
_LEAST_BLOCKS = 8


class OpenVINOGeneration(Engine):
    """Runs `ContinuousBatchingPipeline` in the backend `openvino_generate`."""

    name = "openvino-genai"
    title = "OpenVINO GenAI"
    help = "text generation on CPUs, batched continuously"
    backend = "openvino_generate"
    model_file = "openvino_model.xml"
    graph_precisions: ClassVar[Mapping[str, str]] = dict.fromkeys(PROPERTIES, "fp32")
    # The backend batches by itself, in one process, and answers in pieces.
    idle_options = frozenset({"instances", "response_cache", "rate_limit"})
    parameter_options = frozenset({"max_queue_size", "kv_cache_mb", "max_num_seqs"})
    takes = "decoder"

    def check(self, precision: str, target: "Target") -> None:
        """See `Engine`. The backend is one of Python, which every release runs."""
        from .openvino_model import choose_arithmetic

        self.find_graph_precision(precision)
        choose_arithmetic(precision)

    def check_parameters(
        self, parameters: Mapping[str, int | None], cache_shapes: Sequence[tuple[int, int]], precision: str
    ) -> None:
        """See `Engine`. The memory for keys and values may be too small."""
        given = parameters["kv_cache_mb"] or int(PARAMETERS["kv_cache_mb"])
        least = -(-_LEAST_BLOCKS * measure_block(cache_shapes, precision) // (1 << 20))
        if given < least:
            raise EngineError(
                "the memory for keys and values is too small for this model",
                expected=f"--kv-cache-mb {least} or more",
                got=str(given),
                remedy="raise it, or choose a --precision that keeps them in 8 bits"
                if precision == "fp32"
                else "raise it",
            )

    def write(
        self, model: "PreTrainedModel", cache_shapes: Sequence[tuple[int, int]], path: Path, precision: str
    ) -> None:
        """Write the decoder to `path`, with its weights beside it, and how it is computed.

        Raises:
            GraphError: The architecture cannot be converted.
        """
        from ..graph.stateful_decoder import write_stateful_decoder

        write_stateful_decoder(model, cache_shapes, path)
        if precision == "int8":
            from .openvino_int8 import compress_weights

            compress_weights(path)
        text = json.dumps(PROPERTIES[precision], indent=2) + "\n"
        (path.parent / PROPERTIES_FILE).write_text(text, encoding="utf-8")

    @contextmanager
    def open(self, path: Path, target: "Target") -> Iterator[Runner]:
        """See `Engine`. In this process; the scores that the backend does not show."""
        yield _ScoreRunner(path)

    def generate(
        self, folder: Path, prompts: Sequence[Sequence[int]], max_tokens: int, *, blocks: int = 0
    ) -> list[list[int]]:
        """Return the likeliest tokens after each prompt, all of them written at once, as the backend does it.

        They are asked for as by a request that says nothing but `temperature` 0 and `max_tokens`.

        Args:
            folder: The model's file, with what lies beside it in a version.
            prompts: Token ids.
            max_tokens: How many are written at most.
            blocks: Blocks of keys and values that there are for all; 0 for as many as they need.

        Raises:
            EngineError: It fails.
        """
        import numpy as np
        import openvino as ov
        import openvino_genai as genai

        scheduler = genai.SchedulerConfig()
        longest = max(map(len, prompts)) + max_tokens
        scheduler.num_kv_blocks = blocks or len(prompts) * (longest // BLOCK_TOKENS + 2)
        scheduler.max_num_seqs, scheduler.max_num_batched_tokens = (
            len(prompts),
            int(PARAMETERS["max_num_batched_tokens"]),
        )
        said = json.loads((folder / GENERATION_FILE).read_text(encoding="utf-8"))
        ends, defaults = said["ends"], said["defaults"]
        try:
            pipeline = genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", read_properties(folder))
            handles = []
            for number, prompt in enumerate(prompts):
                config = genai.GenerationConfig(max_new_tokens=max_tokens)
                config.min_new_tokens = min(defaults.get("min_tokens", 0), max_tokens)
                config.repetition_penalty = defaults.get("repetition_penalty", 1.0)
                config.stop_token_ids = set(ends)
                if ends:
                    config.eos_token_id = min(ends)
                ids = ov.Tensor(np.array([prompt], dtype=np.int64))
                handles.append(pipeline.add_request(number, ids, config))
            while pipeline.has_non_finished_requests():
                pipeline.step()
            # Those that do not fit the pool are dropped and have nothing.
            return [[*output.generated_ids] for handle in handles for output in handle.read_all()]
        except RuntimeError as exc:
            raise _explain(folder, exc) from exc

    def configure(self, config: "pb.ModelConfig") -> None:
        """See `Engine`. Answers come in pieces, and the backend batches by itself."""
        from tritonclient.grpc import model_config_pb2 as pb

        config.model_transaction_policy.decoupled = True
        config.instance_group.add(kind=pb.ModelInstanceGroup.KIND_CPU, count=1)
        for name, value in PARAMETERS.items():
            config.parameters[name].string_value = value


def measure_block(cache_shapes: Sequence[tuple[int, int]], precision: str) -> int:
    """Return the bytes that keys and values of `BLOCK_TOKENS` tokens take.

    Args:
        cache_shapes: The heads of each layer's keys and values, and the size of one.
        precision: Name of the precision.
    """
    value, head = VALUE_BYTES[precision]
    return BLOCK_TOKENS * 2 * sum(heads * (value * size + head) for heads, size in cache_shapes)


def read_properties(folder: Path) -> dict[str, str]:
    """Return how the model in `folder` is computed."""
    properties: dict[str, str] = json.loads((folder / PROPERTIES_FILE).read_text(encoding="utf-8"))
    return properties


class _ScoreRunner:
    """The file as OpenVINO runs it without paging: the same weights, and the scores of every token."""

    def __init__(self, path: Path) -> None:
        import openvino as ov

        try:
            self._compiled: ov.CompiledModel = ov.Core().compile_model(str(path), "CPU", read_properties(path.parent))
        except RuntimeError as exc:
            raise _explain(path, exc) from exc
        self._request = self._compiled.create_infer_request()
        self._names = {port.get_any_name() for port in self._compiled.inputs}

    @property
    def versions(self) -> Mapping[str, str]:
        """See `Runner`."""
        from importlib import metadata

        return {
            "openvino": metadata.version("openvino"),
            OpenVINOGeneration.name: metadata.version("openvino-genai"),
        }

    @property
    def peak_bytes(self) -> int:
        """See `Runner`."""
        return 0

    def run(self, output_names: Sequence[str], feeds: "Feed") -> "list[Any]":
        """See `Runner`: the scores of all tokens, fed at once and in pieces."""
        try:
            return [self._score(feeds, _PIECES[name]) for name in output_names]
        except RuntimeError as exc:
            raise _explain(None, exc) from exc

    def _score(self, feeds: "Feed", pieces: Sequence[float]) -> "np.ndarray[Any, Any]":
        import numpy as np

        ids, mask = feeds["input_ids"], feeds["attention_mask"]
        whole = {
            "position_ids": np.maximum(mask.cumsum(axis=1) - 1, 0),
            "beam_idx": np.arange(len(ids), dtype=np.int32),
        }
        self._request.reset_state()
        scores, start = [], 0
        for piece in pieces:
            end = round(piece * ids.shape[1])
            if end == start:
                continue
            fed = {
                "input_ids": ids[:, start:end],
                "attention_mask": mask[:, :end],
                "position_ids": whole["position_ids"][:, start:end],
                "beam_idx": whole["beam_idx"],
            }
            result = self._request.infer({name: value for name, value in fed.items() if name in self._names})
            scores.append(result["logits"].copy())
            start = end
        return np.concatenate(scores, axis=1)


def _explain(path: Path | None, exc: RuntimeError) -> EngineError:
    return EngineError(
        f"OpenVINO fails on {path.name if path else 'the model'}",
        expected="one that it runs",
        got=" ".join(str(exc).split())[:200].rstrip(".:;"),
        remedy="pass --task text-generation-logits, which has the model's scores served by ONNX Runtime",
    )
