"""Photo in, labels out: ours beside FastAPI, Pillow and ONNX Runtime, on a trained MobileNetV2: `make bench-pictures`.

    python -m benches.bench_pictures [--rounds 5] [--seconds 5]

All are asked the same photographs as files, and answer with the five likeliest labels. Servers run side by side
and are asked in turns, so that whatever else the machine does falls on all of them; clients share their cores. A ratio
is taken within a round; what is told is the median of the rounds, with the least and the most.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from harness import CHECKOUT, run
from launcher import find_ports, running
from sklearn.datasets import load_sample_images
from trainers.mobilenet import fetch_photographs, fetch_weights
from tritonclient.http import InferenceServerClient

CONNECTIONS = (1, 8)
REFERENCE = "FastAPI + Pillow + ONNX Runtime"

# Name → engine, precision, layout and copies of the graph. A lean copy waits while its picture comes and its answer
# goes, so more of them than cores are at work.
OURS = {
    "plain": ("onnxruntime", "fp32", "ensemble", 2, 1),
    "lean": ("onnxruntime", "fp32", "lean", 4, 1),
    "wide": ("onnxruntime", "fp32", "lean", 2, 2),
    "brisk": ("openvino", "fp32", "lean", 2, 2),
    "half": ("openvino", "bf16", "lean", 4, 1),
    "wide_half": ("openvino", "bf16", "lean", 2, 2),
    "bytes": ("openvino", "int8", "lean", 2, 2),
}

_START_LIMIT_S = 60.0

# Of KServe's binary form: how long the JSON before the bytes is.
_HEADER = "Inference-Header-Content-Length"


@dataclass(frozen=True, kw_only=True)
class Contender:
    """Whom to ask, and how.

    Attributes:
        url: That takes the bytes of a picture.
        headers: Of the request.
    """

    url: str
    headers: Mapping[str, str]

    def read_labels(self, body: bytes, headers: Mapping[str, str]) -> tuple[str, ...]:
        """Return the labels of its answer, best first."""
        if _HEADER not in headers:
            return tuple(entry["label"] for entry in json.loads(body))
        found = InferenceServerClient.parse_response_body(body, header_length=int(headers[_HEADER]))
        return tuple(label.decode() for label in found.as_numpy("LABEL")[0])


def publish(folder: Path) -> Path:
    """Publish the network in each way, and return the repository."""
    weights = fetch_weights(folder)
    spec = {
        "inputs": {"pixel_values": {"shape": ["batch", 3, 224, 224]}},
        "outputs": ["logits"],
        "answers": {"answers": "labels", "labels": [str(index) for index in range(1000)]},
    }
    (folder / "inputs.json").write_text(json.dumps(spec))
    module = CHECKOUT / "tests" / "trainers" / "mobilenet.py"
    what = [str(weights), "--factory", f"{module}:build", "--inputs", str(folder / "inputs.json")]
    what += ["--pictures", str(fetch_photographs(folder / "photographs"))]
    for name, (engine, precision, steps, copies, threads) in OURS.items():
        how = ["--engine", engine, "--precision", precision, "--steps", steps, "--instances", str(copies)]
        how += ["--threads", str(threads)]
        how += ["--preprocess", "imagenet"]
        how += ["--name", name, "--repository", str(folder / "models")]
        done = run("-m", "export", "run", *what, *how)
        assert done.code == 0, done.err
    return folder / "models"


@contextlib.contextmanager
def serving_script(model: Path) -> Iterator[Contender]:
    """Serve a graph by the script."""
    (port,) = find_ports(1)
    command = [sys.executable, "-m", "uvicorn", "fastapi_pictures:app", "--port", str(port), "--log-level", "warning"]
    process = subprocess.Popen(
        command, cwd=CHECKOUT / "tests" / "benches" / "peers", env=os.environ | {"BENCH_MODEL": str(model)}
    )
    try:
        deadline = time.monotonic() + _START_LIMIT_S
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/docs").close()
                break
            except (urllib.error.URLError, OSError):
                assert process.poll() is None and time.monotonic() < deadline, "the script does not serve"
                time.sleep(0.1)
        yield Contender(url=f"http://127.0.0.1:{port}/classify", headers={})
    finally:
        process.terminate()
        process.wait()


async def ask(
    session: aiohttp.ClientSession, contender: Contender, pictures: Sequence[bytes], connections: int, seconds: float
) -> tuple[float, float]:
    """Return pictures a second and p50 in milliseconds, by so many connections that each wait for their answers."""
    taken: list[float] = []
    begin = time.monotonic()

    async def call(number: int) -> None:
        while (start := time.monotonic()) < begin + seconds:
            picture = pictures[(number + len(taken)) % len(pictures)]
            async with session.post(contender.url, data=picture, headers=contender.headers) as answer:
                assert answer.status == 200, await answer.text()
                await answer.read()
            taken.append(time.monotonic() - start)

    await asyncio.gather(*(call(number) for number in range(connections)))
    return len(taken) / (time.monotonic() - begin), statistics.median(taken) * 1000


async def measure(contenders: Mapping[str, Contender], rounds: int, seconds: float) -> None:
    """Ask all in turns, and print what came of it."""
    pictures = [Path(name).read_bytes() for name in load_sample_images().filenames]
    async with aiohttp.ClientSession() as session:
        for picture in pictures:
            labels = {}
            for name, contender in contenders.items():
                async with session.post(contender.url, data=picture, headers=contender.headers) as answer:
                    labels[name] = contender.read_labels(await answer.read(), answer.headers)
            assert len({best for best, *_ in labels.values()}) == 1, f"they disagree about a picture: {labels}"
            exact = {found for name, found in labels.items() if "bf16" not in name and "int8" not in name}
            assert len(exact) == 1, f"they disagree about a picture: {labels}"
        for connections in CONNECTIONS:
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
            for number in range(rounds + 1):
                for name, contender in contenders.items():
                    window = await ask(session, contender, pictures, connections, seconds if number else 1.0)
                    # The first is to warm up.
                    if number:
                        found[name].append(window)
            sys.stdout.write(describe(connections, found))


def describe(connections: int, found: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Return a line for each contender."""
    lines = [f"{connections} connection{'s' * (connections > 1)}\n"]
    for name, windows in found.items():
        ratios = [ours[0] / other[0] for ours, other in zip(windows, found[REFERENCE], strict=True)]
        rates, latencies = zip(*windows, strict=True)
        lines.append(
            f"  {name:<34}{statistics.median(rates):7.1f} pictures/s   p50 {statistics.median(latencies):6.1f} ms   "
            f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})\n"
        )
    return "".join(lines)


def main() -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=5.0, help="of one window (default: %(default)s)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="modelyard-pictures-") as folder, contextlib.ExitStack() as stack:
        repository = publish(Path(folder))
        server = stack.enter_context(running(repository))
        server.read_until("serving HTTP")
        server.follow()
        contenders = {REFERENCE: stack.enter_context(serving_script(repository / "plain_model/1/model.onnx"))}
        for name, way in OURS.items():
            contenders[f"ours: {', '.join(way[:3])}, {way[3]} x {way[4]} threads"] = Contender(
                url=f"http://127.0.0.1:{server.http}/v2/models/{name}/infer",
                headers={_HEADER: "0", "Content-Type": "application/octet-stream"},
            )
        asyncio.run(measure(contenders, arguments.rounds, arguments.seconds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
