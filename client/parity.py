"""The check of the export once more, through a running server: `python -m client.parity`.

Sends the requests in a version's `golden.json` and compares the answers with those recorded from the checkpoint itself,
over HTTP with JSON tensors, HTTP with binary tensors, and gRPC; each of them alone, and all of one shape in one batch.
Pictures of which the model makes tensors of several sizes are in one batch as far as it takes them together, and a file
in int8 that scales its activations by the largest of a batch is asked for each alone.
"""

from .command.ending import EXIT_UNANSWERED, answer, begin, end_quietly

if __name__ == "__main__":
    # Loading the rest takes a while, of which nobody wants a traceback.
    begin()

import argparse
import base64
import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tritonclient.utils import triton_to_np_dtype

from .command.connection import GRPC_WORDS, HTTP_WORDS, Connection
from .command.parser import Parser
from .errors import ClientError, ModelError, RefusedError
from .locations import name_command
from .model import Model
from .options import DEFAULT_URLS

_EXAMPLES = f"""
example:
  {name_command("parity")} --golden model_repository/sentence_embedding/1/golden.json

exit codes: 0 equal, 1 different or no answer, 2 wrong usage,
{EXIT_UNANSWERED} compared, but the answer cannot be written
"""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One request and the checkpoint's own answer to it.

    Attributes:
        inputs: Name → values; strings as bytes.
        outputs: The same.
    """

    inputs: dict[str, npt.NDArray[Any]]
    outputs: dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class Golden:
    """What a `golden.json` holds, see docs/contracts.md.

    Attributes:
        samples: Each of one row where the model has a batch.
        tolerances: Error → its bound.
        is_text: Whether the strings of all requests are texts.
        is_decoupled: Whether answers come in pieces, from a model that generates text.
        is_alone: Whether the answers are those to rows that are asked alone: in a batch the file gives others.
    """

    samples: list[Sample]
    tolerances: dict[str, float]
    is_text: bool
    is_decoupled: bool = False
    is_alone: bool = False

    @property
    def is_relative(self) -> bool:
        """Whether these are tensors of any meaning, whose errors are counted in parts of their largest value."""
        return "max_relative_error" in self.tolerances


@dataclass(frozen=True, kw_only=True)
class ParityResult:
    """The worst errors over one transport; those of vectors at length 1.

    Attributes:
        transport: How the answers came.
        version: Of the model that answered.
        texts: How many rows were asked for, alone and, where the file answers alike there, in a batch.
        max_abs_error: Largest error of a value; for tensors in parts of the largest value.
        min_cosine: Smallest cosine of vectors and tensors; None for other answers.
        different: Samples whose labels, answers or places are others than the recorded ones.
        passed: Whether all of this is within the recorded tolerances.
    """

    transport: str
    version: str
    texts: int
    max_abs_error: float
    min_cosine: float | None
    different: int
    passed: bool


def main() -> int:
    """Run the command line and return the exit code."""
    arguments = _build_parser().parse_args()
    # Not by `resolve`, which Python below 3.13 ends at a link to itself.
    belongs = Path(os.path.realpath(arguments.golden)).parent.parent.name
    model = belongs if arguments.model is None else arguments.model
    try:
        results = check_parity(read_golden(arguments.golden), model, arguments.url, arguments.grpc_url)
    except ClientError as exc:
        print(f"error: {exc}", file=sys.stderr)  # noqa: T201
        return 1
    if arguments.json:
        answer(json.dumps([asdict(result) for result in results]))
    else:
        answer(f"{model}, version {results[0].version}")
        answer("\n".join(_to_table(results)))
    return 0 if all(result.passed for result in results) else 1


def read_golden(path: Path) -> Golden:
    """Return what a `golden.json` holds.

    Raises:
        ClientError: It cannot be read, or an older modelyard wrote it.
    """
    content = _read_json(path)
    try:
        samples, tolerances = content["samples"], content["tolerances"]
        if not all({"inputs", "outputs"} <= sample.keys() for sample in samples):
            raise ClientError(
                f"{path} was written by an older modelyard",
                expected="samples of inputs and outputs",
                got=", ".join(samples[0]),
                remedy=f"export the model again with `{name_command('run')}`",
            )
        return Golden(
            samples=[
                Sample(inputs=_read_tensors(sample["inputs"]), outputs=_read_tensors(sample["outputs"]))
                for sample in samples
            ],
            tolerances=tolerances,
            is_decoupled=bool(content.get("decoupled")),
            is_alone=bool(content.get("alone")),
            is_text=not any("parameters" in tensor for sample in samples for tensor in sample["inputs"]),
        )
    except KeyError as exc:
        raise _refuse_golden(path, f"JSON without {exc}") from exc
    except (ValueError, TypeError, AttributeError) as exc:
        raise _refuse_golden(path, f"JSON of another form ('{exc}')") from exc


def _read_json(path: Path) -> Any:
    try:
        # A pipe would be waited for, and a device never ends.
        if path.exists() and not path.is_file():
            raise _refuse_golden(path, "no regular file")
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise _refuse_golden(path, f"'{exc.strerror}'") from exc
    except ValueError as exc:
        raise _refuse_golden(path, f"no JSON ('{exc}')") from exc
    except RecursionError as exc:
        raise _refuse_golden(path, "JSON that is nested too deeply") from exc


def _refuse_golden(path: Path, got: str) -> ClientError:
    return ClientError(f"{path} cannot be read", expected="a golden.json", got=got, remedy="correct --golden")


def _read_tensors(tensors: list[dict[str, Any]]) -> dict[str, npt.NDArray[Any]]:
    arrays = {}
    for tensor in tensors:
        is_text = tensor["datatype"] == "BYTES"
        is_base64 = tensor.get("parameters", {}).get("encoding") == "base64"
        decode = base64.b64decode if is_base64 else str.encode
        data = [decode(value) for value in tensor["data"]] if is_text else tensor["data"]
        kind: Any = triton_to_np_dtype(tensor["datatype"])
        arrays[tensor["name"]] = np.array(data, dtype=kind).reshape(tensor["shape"])
    return arrays


def check_parity(golden: Golden, model_name: str, http_url: str, grpc_url: str) -> list[ParityResult]:
    """Return how far the server's answers are from the recorded ones, for each transport.

    Args:
        golden: What is asked, and how far is too far.
        model_name: Whom to ask.
        http_url: host:port.
        grpc_url: host:port.

    Raises:
        ClientError: The server refuses or does not answer.
    """
    http = Connection(http_url, "http", 60.0, words=HTTP_WORDS)
    grpc = Connection(grpc_url, "grpc", 60.0, words=GRPC_WORDS)
    model = http.describe_model(model_name)
    _check_kind(golden, model)
    if golden.is_decoupled:
        written = (("HTTP", http, False), ("HTTP events", http, True), ("gRPC stream", grpc, True))
        return [
            _compare(transport, model, _write_all(golden.samples, model_name, server, is_streamed), golden)
            for transport, server, is_streamed in written
        ]
    transports = [("HTTP JSON", http, False), ("HTTP binary", http, True), ("gRPC", grpc, True)]
    results = []
    # JSON holds no encoded pictures, which are not text.
    for transport, server, binary in transports if golden.is_text else transports[1:]:
        model = server.describe_model(model_name)
        pairs = []
        for batch in _build_batches(golden.samples, 1 if golden.is_alone else model.max_batch_size):
            pairs += _ask(server, model, batch, binary=binary, may_split=not golden.is_text)
        results.append(_compare(transport, model, pairs, golden))
    return results


def _ask(
    server: Connection, model: Model, batch: list[Sample], *, binary: bool, may_split: bool
) -> list[tuple[Sample, dict[str, npt.NDArray[Any]]]]:
    """Return each sample with its row of the answer.

    Args:
        server: Who is asked.
        model: What is asked.
        batch: What goes into one request.
        binary: Whether tensors go and come in bytes.
        may_split: Whether its halves may be asked where it is refused for what it holds: of pictures alone the model
            says which become one tensor.
    """
    inputs = {name: np.concatenate([sample.inputs[name] for sample in batch]) for name in batch[0].inputs}
    try:
        answers = server.infer_tensors(model, inputs, binary=binary)
    except RefusedError as exc:
        if len(batch) == 1 or not (may_split and exc.is_content):
            raise
        halves = batch[: len(batch) // 2], batch[len(batch) // 2 :]
        return [pair for half in halves for pair in _ask(server, model, half, binary=binary, may_split=True)]
    # A graph without a batch dimension has one sample in each of its "batches", and no row to be cut out.
    rows = [slice(index, index + 1) if len(batch) > 1 else slice(None) for index in range(len(batch))]
    return [
        (sample, {name: values[row] for name, values in answers.items()})
        for sample, row in zip(batch, rows, strict=True)
    ]


def _check_kind(golden: Golden, model: Model) -> None:
    """Refuse a model of another kind than the one that the answers were recorded of.

    Raises:
        ModelError: Its inputs or outputs have other names.
    """
    sample = golden.samples[0]
    for kind, wanted, had in (("inputs", sample.inputs, model.inputs), ("outputs", sample.outputs, model.outputs)):
        if not wanted.keys() <= set(had):
            raise ModelError(
                f"{model.name} is not the model that --golden was recorded of",
                expected=f"the {kind} {', '.join(wanted)}",
                got=", ".join(had),
                remedy=f"correct --golden or {HTTP_WORDS.model}",
            )


def _write_all(
    samples: list[Sample], model_name: str, server: Connection, is_streamed: bool
) -> list[tuple[Sample, dict[str, npt.NDArray[Any]]]]:
    """Return each sample with the text that came, its pieces put together."""
    pairs = []
    for sample in samples:
        text = "".join(server.write(model_name, sample.inputs, is_streamed=is_streamed))
        pairs.append((sample, {"text_output": np.array([text.encode()], dtype=np.object_)}))
    return pairs


def _build_batches(samples: list[Sample], largest: int) -> list[list[Sample]]:
    """Return each sample alone, then all of one shape together, in batches as large as the model takes."""
    alike: dict[Any, list[Sample]] = {}
    for sample in samples:
        alike.setdefault(tuple(array.shape for array in sample.inputs.values()), []).append(sample)
    batches = [group[start : start + largest] for group in alike.values() for start in range(0, len(group), largest)]
    return [*([sample] for sample in samples), *(batch for batch in batches if len(batch) > 1)]


def _compare(
    transport: str, model: Model, pairs: list[tuple[Sample, dict[str, npt.NDArray[Any]]]], golden: Golden
) -> ParityResult:
    bounds = golden.tolerances
    bound = bounds["max_relative_error" if golden.is_relative else "max_abs_error"]
    errors, cosines, different = [], [], 0
    for sample, got in pairs:
        is_same = True
        for name, want in sample.outputs.items():
            if golden.is_relative or want.dtype.kind == "f":
                error, cosine, is_filled_well = _measure(want, got[name], golden)
                errors.append(error)
                cosines.append(cosine)
                is_same &= is_filled_well
        different += not (is_same and (golden.is_relative or _are_same(sample.outputs, got, bound)))
    # np.max keeps a NaN, and the comparisons are written so that it fails.
    error = float(np.max(errors, initial=0.0))
    worst_cosine = float(np.min(cosines, initial=1.0)) if "min_cosine" in bounds else None
    return ParityResult(
        transport=transport,
        version=model.version,
        texts=len(pairs),
        max_abs_error=error,
        min_cosine=worst_cosine,
        different=different,
        passed=error <= bound and (worst_cosine is None or worst_cosine >= bounds["min_cosine"]) and not different,
    )


def _measure(expected: npt.NDArray[Any], got: npt.NDArray[Any], golden: Golden) -> tuple[float, float, bool]:
    """Return the largest error, the cosine, and whether whatever a batch added is only filling."""
    want = expected.reshape(-1).astype(np.float64)
    if golden.is_relative:
        have, is_filled_well = got.reshape(-1).astype(np.float64), got.shape == expected.shape
    else:
        values, is_filled_well = _split(got, want.size, (0.0,))
        have = values.astype(np.float64)
    if have.shape != want.shape:
        return np.inf, -1.0, False
    scale = float(np.abs(want).max(initial=0.0)) or 1.0
    if not golden.is_relative:
        # Vectors have a direction; scores are compared as they are.
        is_vector = "min_cosine" in golden.tolerances
        want, have = (want / np.linalg.norm(want), have / np.linalg.norm(have)) if is_vector else (want, have)
        scale = 1.0
    error = float(np.abs(want - have).max(initial=0.0)) / scale
    lengths = float(np.linalg.norm(want) * np.linalg.norm(have))
    return error, float((want * have).sum()) / lengths if lengths else 1.0 - error, is_filled_well


def _split(values: npt.NDArray[Any], count: int, filling: tuple[Any, ...]) -> tuple[npt.NDArray[Any], bool]:
    """Return the first `count` values, and whether the others are the filling of a row with fewer answers."""
    flat = values.reshape(-1)
    return flat[:count], all(value in filling for value in flat[count:].tolist())


def _are_same(expected: dict[str, npt.NDArray[Any]], got: dict[str, npt.NDArray[Any]], tolerance: float) -> bool:
    """Tell whether labels and places are the recorded ones; answers of equal score may stand in either order."""
    scores = next((array.reshape(-1) for array in expected.values() if array.dtype.kind == "f"), np.empty(0))
    wanted, had = [], []
    for name, want in expected.items():
        if want.dtype.kind == "f":
            continue
        values, is_filled_well = _split(got[name], want.size, (-1,) if want.dtype.kind == "i" else (b"", ""))
        # JSON brings text, the binary encodings bring bytes.
        have = [value.encode("utf-8") if isinstance(value, str) else value for value in values.tolist()]
        if not is_filled_well or len(have) != want.size:
            return False
        if want.size != scores.size and have != want.reshape(-1).tolist():
            return False
        if want.size == scores.size:
            wanted.append(want.reshape(-1).tolist())
            had.append(have)
    rows, found = list(zip(*wanted, strict=True)), list(zip(*had, strict=True))
    return all(
        any(found[index] == rows[other] for other in np.flatnonzero(np.abs(scores - scores[index]) <= 2 * tolerance))
        for index in range(len(found))
    )


def _to_table(results: list[ParityResult]) -> list[str]:
    rows = [f"{'transport':<12}{'texts':>6}{'max abs error':>15}{'min cosine':>12}{'different':>11}"]
    for result in results:
        verdict = "ok" if result.passed else "FAILED"
        cosine = "-" if result.min_cosine is None else f"{result.min_cosine:.7f}"
        rows.append(
            f"{result.transport:<12}{result.texts:>6}{result.max_abs_error:>15.1e}{cosine:>12}"
            f"{result.different:>11}  {verdict}"
        )
    return rows


def _build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=name_command("parity"),
        description="Compare a running server's answers with those of the checkpoint.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--golden", type=Path, required=True, metavar="FILE", help="golden.json of the version served")
    parser.add_argument("--model", help="model to ask (default: the one the file belongs to)")
    parser.add_argument("--url", default=DEFAULT_URLS["http"], help="HTTP host:port (default: %(default)s)")
    parser.add_argument("--grpc-url", default=DEFAULT_URLS["grpc"], help="gRPC host:port (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(end_quietly(main))
