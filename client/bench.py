"""How fast a running server answers real text: `python -m client.bench`.

One sweep over the number of requests in flight, over HTTP and gRPC.
"""

from .command.ending import EXIT_UNANSWERED, answer, begin, end_quietly

if __name__ == "__main__":
    # Loading the rest takes a while, of which nobody wants a traceback.
    begin()

import argparse
import json
import random
import re
import statistics
import sys
from dataclasses import asdict

from .command.connection import GRPC_WORDS, HTTP_WORDS, Connection
from .command.parser import Parser
from .errors import ClientError
from .locations import name_command
from .options import DEFAULT_URLS
from .perf_analyzer import PROTOCOLS, Measurement, find_perf_analyzer, measure_texts

_EXAMPLES = f"""
examples:
  {name_command("bench")}
  {name_command("bench")} --url localhost:8000 --grpc-url localhost:8001 --concurrency 1 --concurrency 32 --json
  {name_command("bench")} --protocol json --protocol grpc --concurrency 16

exit codes: 0 measured, 1 no server, no perf_analyzer or a failed request, 2 wrong usage,
{EXIT_UNANSWERED} measured, but the answer cannot be written
"""

_PROTOCOLS = ("http", "grpc")
_CONCURRENCIES = (1, 2, 4, 8, 16)
_REQUESTS = 300
_TEXTS = 400


def main() -> int:
    """Run the command line and return the exit code."""
    arguments = _build_parser().parse_args()
    try:
        measurements = _sweep(arguments)
    except ClientError as exc:
        print(f"error: {exc}", file=sys.stderr)  # noqa: T201
        return 1
    if arguments.json:
        answer(json.dumps([asdict(measurement) for measurement in measurements]))
    else:
        answer("\n".join(_to_table(measurements)))
    return 0


def read_corpus() -> list[str]:
    """Return the paragraphs of Python's own language reference: real English that every installation carries.

    Their lengths are as uneven as those of real requests: half have under 20 words, some have hundreds.
    """
    # Imported here, for it is a file of a megabyte that only this needs.
    from pydoc_data import topics

    paragraphs = (" ".join(part.split()) for text in topics.topics.values() for part in text.split("\n\n"))
    return sorted({part for part in paragraphs if re.search(r"[a-z]{3}.* .*[a-z]{3}", part)})


def _sweep(arguments: argparse.Namespace) -> list[Measurement]:
    model = Connection(arguments.url, "http", 30.0, words=HTTP_WORDS).find_model(arguments.model)
    protocols = arguments.protocol or _PROTOCOLS
    if "grpc" in protocols:
        # perf_analyzer waits without end for a port that says nothing.
        Connection(arguments.grpc_url, "grpc", 30.0, words=GRPC_WORDS).find_model(model.name)
    program = find_perf_analyzer()
    # The same texts in the same order every time.
    texts = random.Random(0).sample(read_corpus(), _TEXTS)
    words = [len(text.split()) for text in texts]
    _say(f"perf_analyzer {program.source}: {program.executable}")
    _say(
        f"{model.name}, {len(texts)} texts of {statistics.mean(words):.0f} words on average, {max(words)} at most; "
        f"{arguments.requests} requests a window, three windows a row"
    )
    measurements = []
    urls = {"http": arguments.url, "json": arguments.url, "grpc": arguments.grpc_url}
    for protocol in protocols:
        for concurrency in arguments.concurrency or _CONCURRENCIES:
            _say(f"  measuring {protocol}, {concurrency} in flight")
            measurements.append(
                measure_texts(
                    program,
                    model=model,
                    url=urls[protocol],
                    protocol=protocol,
                    texts=texts,
                    concurrency=concurrency,
                    request_count=arguments.requests,
                )
            )
    return measurements


def _to_table(measurements: list[Measurement]) -> list[str]:
    base = measurements[0].inferences_per_s
    rows = [f"{'':<6}{'in flight':>10}{'texts/s':>10}{'ratio':>7}{'p50 ms':>9}{'p95 ms':>9}{'p99 ms':>9}"]
    rows += [
        f"{m.protocol:<6}{m.concurrency:>10}{m.inferences_per_s:>10.1f}{m.inferences_per_s / base:>7.2f}"
        f"{m.p50_ms:>9.1f}{m.p95_ms:>9.1f}{m.p99_ms:>9.1f}"
        for m in measurements
    ]
    return rows


def _build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=name_command("bench"),
        description="Measure a running server with perf_analyzer on real text.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--url", default=DEFAULT_URLS["http"], help="HTTP host:port (default: %(default)s)")
    parser.add_argument("--grpc-url", default=DEFAULT_URLS["grpc"], help="gRPC host:port (default: %(default)s)")
    parser.add_argument("--model", help="model to measure (default: the one ensemble there is)")
    parser.add_argument(
        "--concurrency", type=int, action="append", help="requests in flight; may be repeated (default: 1 to 16)"
    )
    parser.add_argument(
        "--protocol",
        choices=PROTOCOLS,
        action="append",
        help="how to ask, over HTTP with binary tensors or with JSON's; may be repeated (default: http and grpc)",
    )
    parser.add_argument("--requests", type=int, default=_REQUESTS, help="requests a window (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(end_quietly(main))
