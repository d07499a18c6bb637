"""How export, memory, start and speed grow with the model, texts and callers: `make growth`.

    python -m benches.bench_growth [--sizes 6x384 12x768 24x1024] [--seconds 4]

Random BERTs of the layers and widths that are asked for, in fp32 on ONNX Runtime, with lean steps. Each figure is told
with the power by which it grows from the least to the greatest: 1 is in proportion. The plots are written
to `.cache/bench/growth.html`, a page of its own.
"""

import argparse
import asyncio
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benches.measure_memory import build_checkpoint, list_tree, read_resident
from benches.serving.http_load import drive
from harness import CHECKOUT
from jinja2 import Environment
from launcher import Running, running
from tokenizers import Tokenizer

from demo.checkpoint import fetch_checkpoint
from export.commands.inspect_checkpoint import inspect_checkpoint

PAGE = CHECKOUT / ".cache" / "bench" / "growth.html"
LENGTHS = (8, 32, 128, 256)
CONNECTIONS = (1, 4, 16, 64)

# Of the texts that connections are tried with, and the connections that lengths are tried with.
_LENGTH, _CALLERS = 32, 4
_LOOK_S = 0.05

# Of a plot, in units of its page.
_LEFT, _TOP, _WIDTH, _HEIGHT = 75, 40, 300, 170


@dataclass
class Curve:
    """One figure at several sizes.

    Attributes:
        title: What it is, with its unit.
        axis: What it grows with.
        points: Place on that axis, its name and the value.
        falls: Whether in proportion means that it falls.
    """

    title: str
    axis: str
    points: list[tuple[float, str, float]] = field(default_factory=list)
    falls: bool = False

    @property
    def power(self) -> float:
        """By which power it grows between the ends."""
        (first, _, low), *_, (last, _, high) = self.points
        return math.log(high / low) / math.log(last / first)


def export(checkpoint: Path, repository: Path) -> tuple[float, int]:
    """Publish a checkpoint; return seconds, and what all processes held at most in bytes."""
    command = [sys.executable, "-m", "export", "run", str(checkpoint), "--name", "m", "--repository", str(repository)]
    command += ["--task", "feature-extraction", "--steps", "lean"]
    began, most = time.monotonic(), 0
    process = subprocess.Popen(command, cwd=CHECKOUT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None:
        most = max(most, sum(map(read_resident, list_tree(process.pid))))
        time.sleep(_LOOK_S)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed")
    return time.monotonic() - began, most


def make_text(length: int) -> str:
    """Return a text of so many tokens, the special ones included."""
    tokenizer = Tokenizer.from_file(str(fetch_checkpoint() / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    words = ["river"] * length
    while len(tokenizer.encode(" ".join(words)).ids) > length:
        words.pop()
    return " ".join(words)


def measure_speed(server: Running, length: int, connections: int, seconds: float) -> float:
    """Return texts a second."""
    body = {"inputs": [{"name": "TEXT", "datatype": "BYTES", "shape": [1, 1], "data": [make_text(length)]}]}
    plan: dict[str, Any] = {"port": server.http, "path": "/v2/models/m/infer", "bodies": [json.dumps(body)]}
    plan |= {"connections": connections, "warm_s": 1.0, "seconds": seconds, "pid": server.process.pid}
    found = asyncio.run(drive(plan))
    if found["errors"]:
        raise SystemExit(f"{found['errors'][0]} at {connections} connections and {length} tokens")
    return len(found["latencies_ms"]) / found["seconds"]


def start(repository: Path) -> float:
    """Return the seconds that a server takes until its model answers as verified."""
    began = time.monotonic()
    with running(repository) as server:
        server.read_until("ready, answers as verified")
        return time.monotonic() - began


def measure(sizes: Sequence[str], seconds: float) -> list[Curve]:
    """Return all curves; those of length and connections are of the first size."""
    parameters = "million parameters"
    exports, peaks = Curve("Export, s", parameters), Curve("Export, GB at most", parameters)
    starts, instances = Curve("Start to first answer, s", parameters), Curve("An instance, MB", parameters)
    speeds = Curve(f"Texts of {_LENGTH} tokens/s", parameters, falls=True)
    lengths = Curve(f"Texts/s at {_CALLERS} connections", "tokens", falls=True)
    callers = Curve(f"Texts of {_LENGTH} tokens/s", "connections")
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = build_checkpoint("bert", size, Path(folder, size))
            millions = inspect_checkpoint(checkpoint).parameters / 1e6
            place = (millions, f"{millions:.0f}")
            repository = Path(folder, "models")
            took, most = export(checkpoint, repository)
            exports.points.append((*place, took))
            peaks.points.append((*place, most / 1e9))
            starts.points.append((*place, statistics.median(start(repository) for _ in range(3))))
            with running(repository) as server:
                server.read_until("serving HTTP")
                server.follow()
                instances.points.append((*place, read_resident(server.find_stubs("m")[0].pid) / 1e6))
                speeds.points.append((*place, measure_speed(server, _LENGTH, _CALLERS, seconds)))
                if size == sizes[0]:
                    for length in LENGTHS:
                        rate = measure_speed(server, length, _CALLERS, seconds)
                        lengths.points.append((length, str(length), rate))
                    for count in CONNECTIONS:
                        rate = measure_speed(server, _LENGTH, count, seconds)
                        callers.points.append((count, str(count), rate))
        sys.stderr.write(f"{size} is measured\n")
    return [exports, peaks, starts, instances, speeds, lengths, callers]


def draw(curve: Curve) -> dict[str, Any]:
    """Return a plot as the page takes it."""
    places = [math.log(place) for place, _, _ in curve.points]
    values = [math.log(value) for _, _, value in curve.points]
    wide = places[-1] - places[0]
    # As many decades up as to the right, so that what grows in proportion climbs as the guide does.
    low, high = min(values), max(max(values), min(values) + wide)

    def at(place: float, value: float) -> tuple[float, float]:
        x = _LEFT + _WIDTH * (place - places[0]) / wide
        return round(x, 1), round(_TOP + _HEIGHT * (high - value) / (high - low), 1)

    first = high if curve.falls else low
    last = first + (-wide if curve.falls else wide)
    points = [
        {"x": at(place, value)[0], "y": at(place, value)[1], "name": name, "value": f"{shown:.3g}"}
        for place, value, (_, name, shown) in zip(places, values, curve.points, strict=True)
    ]
    guide = (*at(places[0], first), *at(places[-1], max(min(last, high), low)))
    return {"title": curve.title, "axis": curve.axis, "points": points, "guide": guide}


def main() -> None:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["6x384", "12x768", "24x1024"], help="layers x width")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each window (default: %(default)s)")
    args = parser.parse_args()
    curves = measure(args.sizes, args.seconds)
    for curve in curves:
        shown = ", ".join(f"{name}: {value:.3g}" for _, name, value in curve.points)
        sys.stdout.write(f"{curve.title:28} {curve.axis:20} {shown}   power {curve.power:.2f}\n")
    template = Environment(autoescape=True).from_string(Path(__file__).with_name("growth.html").read_text())
    about = f"Random BERTs of {', '.join(args.sizes)} (layers x width), fp32, ONNX Runtime, lean steps."
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(template.render(about=about, panels=[draw(curve) for curve in curves]))
    sys.stdout.write(f"{PAGE}\n")


if __name__ == "__main__":
    main()
