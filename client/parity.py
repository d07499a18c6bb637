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

from client.infer import DEFAULT_URLS, ClientError, Server

_EXAMPLES = """
example:
  python -m client.parity --golden model_repository/sentence_embedding/1/golden.json

exit codes: 0 equal, 1 different or no answer, 2 wrong usage
"""


@dataclass(frozen=True, kw_only=True)
class ParityResult:
    """The worst errors over one transport, on vectors of length 1."""

    transport: str
    texts: int
    max_abs_error: float
    min_cosine: float
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
    texts = [sample["text"].encode("utf-8") for sample in golden["samples"]]
    expected = np.array([sample["expected"] for sample in golden["samples"]], dtype=np.float64)
    http, grpc = Server(http_url, "http", 60.0), Server(grpc_url, "grpc", 60.0)
    results = []
    for transport, server, binary in (("HTTP JSON", http, False), ("HTTP binary", http, True), ("gRPC", grpc, True)):
        model = server.find_model(model_name)
        together = server.infer(model, texts, binary=binary)[golden["output"]]
        alone = np.concatenate([server.infer(model, [text], binary=binary)[golden["output"]] for text in texts])
        got = np.concatenate([together, alone]).astype(np.float64)
        results.append(_compare(transport, np.concatenate([expected, expected]), got, golden["tolerances"]))
    return results


def _compare(
    transport: str, expected: npt.NDArray[np.float64], got: npt.NDArray[np.float64], bounds: dict[str, float]
) -> ParityResult:
    want = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    have = got / np.linalg.norm(got, axis=1, keepdims=True)
    error, cosine = float(np.abs(want - have).max()), float((want * have).sum(axis=1).min())
    return ParityResult(
        transport=transport,
        texts=len(got),
        max_abs_error=error,
        min_cosine=cosine,
        # Written so that NaN fails.
        passed=error <= bounds["max_abs_error"] and cosine >= bounds["min_cosine"],
    )


def _to_table(results: list[ParityResult]) -> list[str]:
    rows = [f"{'transport':<12}{'texts':>6}{'max abs error':>15}{'min cosine':>12}"]
    for result in results:
        verdict = "ok" if result.passed else "FAILED"
        rows.append(
            f"{result.transport:<12}{result.texts:>6}{result.max_abs_error:>15.1e}{result.min_cosine:>12.7f}  {verdict}"
        )
    return rows


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m client.parity",
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
