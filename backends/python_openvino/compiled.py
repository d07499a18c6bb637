"""A published graph in OpenVINO, without a word about Triton."""

import json
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

# OpenVINO sends statistics of use unless the package that sends them is missing; to it, it now is.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]

import openvino  # noqa: E402

Array = npt.NDArray[Any]

# Of what a graph of one length is worth compiling for, far more than the export asks for.
_LONGEST = 4096


class CompiledGraph:
    """The model that `openvino.json` describes, compiled for rows of any length and once more for each of a few.

    A graph that is given another shape than the time before plans each of its operations anew. Of all-MiniLM-L6-v2 that
    is a quarter of what a usual text takes, and padding to a length whose graph is planned already is much less. The
    graphs of single lengths are compiled in the background, for together they take longer than the one that is needed
    to answer at all.

    Args:
        path: The `openvino.json`.
        threads: What one run has.

    Raises:
        ValueError: This is not what it was proven with.
    """

    def __init__(self, path: Path, *, threads: int = 1) -> None:
        described = json.loads(path.read_text(encoding="utf-8"))
        check_cpu(path, described["instructions"])
        version = openvino.__version__.split("-")[0]
        if ".".join(described["openvino"].split(".")[:3]) != ".".join(version.split(".")[:3]):
            raise ValueError(
                f"{path} was proven with another OpenVINO: expected {described['openvino']}, got {version}; install "
                f"that one, or export the model again"
            )
        self._options = {
            "INFERENCE_PRECISION_HINT": described["hint"],
            "NUM_STREAMS": "1",
            "INFERENCE_NUM_THREADS": str(threads),
            # Two processes would pin their threads to the same core.
            "ENABLE_CPU_PINNING": "NO",
        }
        self._lengths = read_lengths(path, described)
        self._padding: Mapping[str, int] = described.get("padding", {})
        self._of_length: dict[int, Any] = {}
        self._is_closing = False
        model = openvino.Core().read_model(str(path.with_name(described["graph"])))
        self._of_any = self._compile(model)
        self._compiling = threading.Thread(target=self._compile_lengths, args=(model,), name="graphs of single lengths")
        self._compiling.start()

    def run(self, names: Sequence[str], feed: Mapping[str, Array]) -> list[Array]:
        """Return outputs of rows of one length.

        Args:
            names: Of the outputs.
            feed: Input name → [rows, ...].
        """
        size = next(iter(feed.values())).shape[1] if self._lengths else 0
        length = next((length for length in self._lengths if length >= size), 0)
        request = self._of_length.get(length)
        if request is None:
            answers = self._of_any.infer(dict(feed), share_inputs=True)
            return [answers[name] for name in names]
        padded = {name: self._pad(name, array, length) for name, array in feed.items()}
        rows = [
            request.infer({name: array[row : row + 1] for name, array in padded.items()}, share_inputs=True)
            for row in range(len(next(iter(padded.values()))))
        ]
        return [rows[0][name] if len(rows) == 1 else np.concatenate([row[name] for row in rows]) for name in names]

    def close(self) -> None:
        """End what is done in the background; OpenVINO does not outlive the end of its process at work."""
        self._is_closing = True
        self._compiling.join()

    def _pad(self, name: str, array: Array, length: int) -> Array:
        padded = np.full((len(array), length), self._padding.get(name, 0), dtype=array.dtype)
        padded[:, : array.shape[1]] = array
        return padded

    def _compile(self, model: Any) -> Any:
        return openvino.Core().compile_model(model, "CPU", self._options).create_infer_request()

    def _compile_lengths(self, model: Any) -> None:
        for length in self._lengths:
            if self._is_closing:
                return
            try:
                fixed = model.clone()
                fixed.reshape({tensor.any_name: [1, length] for tensor in fixed.inputs})
                self._of_length[length] = self._compile(fixed)
            # It lacks memory, as a rule; there is another graph that answers.
            except RuntimeError as exc:
                said = (str(exc).strip() or type(exc).__name__).splitlines()[-1].strip().rstrip(".")
                sys.stderr.write(
                    f"warning: there is no graph for texts of {length} tokens: expected OpenVINO to compile it, got "
                    f"'{said}'; they take longer in the graph of any length.\n"
                )


def read_lengths(path: Path, described: Mapping[str, Any]) -> Sequence[int]:
    """Return the lengths that have a graph of their own, the smallest first; none where `openvino.json` names none.

    Raises:
        ValueError: It names something else than lengths, or padding that is no number.
    """
    lengths: list[int] = described.get("lengths", [])
    padding = described.get("padding", {})
    is_right = isinstance(lengths, list) and all(type(each) is int and 0 < each <= _LONGEST for each in lengths)
    if not is_right or lengths != sorted(lengths):
        raise ValueError(
            f"{path} has wrong lengths: expected numbers of tokens from 1 to {_LONGEST}, the smallest first, got "
            f"{lengths!r}; put the file back, or export the model again"
        )
    if not isinstance(padding, dict) or not all(type(each) is int for each in padding.values()):
        raise ValueError(
            f"{path} has wrong padding: expected a number for an input, got {padding!r}; put the file back, or export "
            f"the model again"
        )
    return lengths


def check_cpu(path: Path, instructions: "list[str]", cpuinfo: Path = Path("/proc/cpuinfo")) -> None:
    """Refuse a CPU that computes otherwise than the one that the model was proven on.

    Raises:
        ValueError: It has none of `instructions`.
    """
    lines = cpuinfo.read_text(encoding="ascii", errors="replace").splitlines()
    flags = set(next((line for line in lines if line.startswith("flags")), "").split())
    if instructions and not flags & {*instructions}:
        raise ValueError(
            f"{path} was proven on another kind of CPU: expected one with {' or '.join(instructions)}, got "
            f"one without; serve it there, or export the model again on this one"
        )
