"""The check of the export once more, through a running server: `python -m client.parity`.

Sends the texts in a version's `golden.json` and compares the answers with those recorded from the checkpoint itself,
over HTTP with JSON tensors, HTTP with binary tensors, and gRPC; each text alone, and all of them in one batch.
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tritonclient.utils import triton_to_np_dtype

from .infer import DEFAULT_URLS, ClientError, Server
from .locations import name_command

_EXAMPLES = f"""
example:
  {name_command("parity")} --golden model_repository/sentence_embedding/1/golden.json

exit codes: 0 equal, 1 different or no answer, 2 wrong usage
"""


@dataclass(frozen=True, kw_only=True)
class ParityResult:
    """The worst errors over one transport; those of vectors at length 1.

    Attributes:
        transport: How the answers came.
        texts: How many there were, or samples of tensors.
        max_abs_error: Of the values; of tensors in parts of the largest one.
        min_cosine: Of vectors and tensors; None for other answers.
        different: Texts whose labels, answers or places are others than the recorded ones.
        passed: Whether all of this is within the recorded tolerances.
    """

    transport: str
    texts: int
    max_abs_error: float
    min_cosine: float | None
    different: int
    passed: bool


def main() -> int:
    """Run the command line and return the exit code."""
    arguments = _build_parser().parse_args()
    golden = json.loads(arguments.golden.read_text(encoding="utf-8"))
    model = arguments.model or arguments.golden.resolve().parent.parent.name
    try:
        results = check_parity(golden, model, arguments.url, arguments.grpc_url)
    except ClientError as exc:
        print(f"error: {exc}", file=sys.stderr)  # noqa: T201
        return 1
    if arguments.json:
        print(json.dumps([asdict(result) for result in results]))  # noqa: T201
    else:
        print("\n".join(_to_table(results)))  # noqa: T201
    return 0 if all(result.passed for result in results) else 1


def check_parity(golden: dict[str, Any], model_name: str, http_url: str, grpc_url: str) -> list[ParityResult]:
    """Return how far the server's answers are from the recorded ones, for each transport.

    Args:
        golden: The content of a `golden.json`.
        model_name: Whom to ask.
        http_url: host:port.
        grpc_url: host:port.

    Raises:
        ClientError: The server refuses or does not answer.
    """
    samples = golden["samples"]
    if "inputs" in samples[0]:
        return _check_tensors(golden, model_name, http_url, grpc_url)
    texts = [sample["text"].encode("utf-8") for sample in samples]
    pairs = [sample["pair"].encode("utf-8") for sample in samples if "pair" in sample]
    http, grpc = Server(http_url, "http", 60.0), Server(grpc_url, "grpc", 60.0)
    results = []
    for transport, server, binary in (("HTTP JSON", http, False), ("HTTP binary", http, True), ("gRPC", grpc, True)):
        model = server.find_model(model_name)
        together = server.infer(model, texts, pairs=pairs, binary=binary)
        rows = [{name: array[index] for name, array in together.items()} for index in range(len(texts))]
        for index, text in enumerate(texts):
            alone = server.infer(model, [text], pairs=pairs[index : index + 1], binary=binary)
            rows.append({name: array[0] for name, array in alone.items()})
        results.append(_compare(transport, [*samples, *samples], rows, golden))
    return results


def _check_tensors(golden: dict[str, Any], model_name: str, http_url: str, grpc_url: str) -> list[ParityResult]:
    """Do the same for a model that takes tensors: errors are counted in parts of an output's largest value."""
    bounds = golden["tolerances"]
    http, grpc = Server(http_url, "http", 60.0), Server(grpc_url, "grpc", 60.0)
    results = []
    for transport, server, binary in (("HTTP JSON", http, False), ("HTTP binary", http, True), ("gRPC", grpc, True)):
        errors, cosines = [], []
        for sample in golden["samples"]:
            inputs = {tensor["name"]: (_to_array(tensor), tensor["datatype"]) for tensor in sample["inputs"]}
            names = [tensor["name"] for tensor in sample["outputs"]]
            answers = server.infer_tensors(model_name, inputs, names, binary=binary)
            for tensor in sample["outputs"]:
                want, have = _to_array(tensor).astype(np.float64), answers[tensor["name"]].astype(np.float64)
                same_shape = want.shape == have.shape
                largest = float(np.abs(want).max(initial=0.0)) or 1.0
                errors.append(float(np.abs(want - have).max(initial=0.0)) / largest if same_shape else np.inf)
                lengths = float(np.linalg.norm(want) * np.linalg.norm(have)) if same_shape else 0.0
                cosines.append(float((want * have).sum()) / lengths if lengths else 1.0 - errors[-1])
        error, cosine = float(np.max(errors)), float(np.min(cosines))
        results.append(
            ParityResult(
                transport=transport,
                texts=len(golden["samples"]),
                max_abs_error=error,
                min_cosine=cosine,
                different=0,
                passed=error <= bounds["max_relative_error"] and cosine >= bounds["min_cosine"],
            )
        )
    return results


def _to_array(tensor: dict[str, Any]) -> npt.NDArray[Any]:
    kind: Any = triton_to_np_dtype(tensor["datatype"])
    return np.array(tensor["data"], dtype=kind).reshape(tensor["shape"])


def _compare(
    transport: str, samples: list[dict[str, Any]], rows: list[dict[str, npt.NDArray[Any]]], golden: dict[str, Any]
) -> ParityResult:
    bounds = golden["tolerances"]
    # Vectors have a direction; scores are compared as they are.
    is_vector = "min_cosine" in bounds
    errors, cosines, different = [], [], 0
    for sample, row in zip(samples, rows, strict=True):
        want = np.array(sample["expected"], dtype=np.float64)
        have, is_filled_well = _split(row[golden["output"]], len(want), (0.0,))
        if is_vector:
            want, have = want / np.linalg.norm(want), have / np.linalg.norm(have)
            cosines.append(float((want * have).sum()))
        errors.append(np.abs(want - have).max() if have.shape == want.shape else np.inf)
        different += not (is_filled_well and _are_same(sample.get("others", {}), row, want, bounds["max_abs_error"]))
    # np.max keeps a NaN, and the comparisons are written so that it fails.
    error, cosine = float(np.max(errors)), float(np.min(cosines)) if is_vector else None
    return ParityResult(
        transport=transport,
        texts=len(rows),
        max_abs_error=error,
        min_cosine=cosine,
        different=different,
        passed=error <= bounds["max_abs_error"]
        and (cosine is None or cosine >= bounds["min_cosine"])
        and not different,
    )


def _split(values: npt.NDArray[Any], count: int, filling: tuple[Any, ...]) -> tuple[npt.NDArray[Any], bool]:
    """Return the first `count` values, and whether the others are the filling of a row with fewer answers."""
    flat = values.reshape(-1)
    return flat[:count], all(value in filling for value in flat[count:].tolist())


def _are_same(
    expected: dict[str, list[Any]], row: dict[str, npt.NDArray[Any]], scores: npt.NDArray[Any], tolerance: float
) -> bool:
    """Tell whether labels and places are the recorded ones; answers of equal score may stand in either order."""
    names = list(expected)
    columns = []
    for name in names:
        # JSON brings text, the binary encodings bring bytes.
        filling: tuple[Any, ...] = (-1,) if row[name].dtype.kind == "i" else (b"", "")
        values, is_filled_well = _split(row[name], len(expected[name]), filling)
        columns.append([value.decode("utf-8") if isinstance(value, bytes) else value for value in values.tolist()])
        if not is_filled_well or len(columns[-1]) != len(expected[name]):
            return False
    have = list(zip(*columns, strict=True))
    want = list(zip(*(expected[name] for name in names), strict=True))
    return all(
        any(have[index] == want[other] for other in np.flatnonzero(np.abs(scores - scores[index]) <= 2 * tolerance))
        for index in range(len(have))
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
    parser = argparse.ArgumentParser(
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
    sys.exit(main())
