"""Finds or fetches NVIDIA's perf_analyzer, and runs it on texts."""

import csv
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import ClientError
from .locations import CACHE
from .model import Model

# The last tritonclient whose wheel carries the program. It runs on every glibc that the server runs on, where the
# distribution perf-analyzer needs glibc 2.38 and is below that, silently, an empty 0.1.0.
_WHEEL = "tritonclient==2.50.0"
_WHEEL_PLATFORM = "manylinux1_x86_64"
_WHEEL_SHA256 = "421fbb69ae6ab8cdb2c35b82134fcef2fe11e7af7718b1fcbc53335ab9bfe889"

# Runs the program beside it with the libraries beside it, whoever calls it.
_WRAPPER = """#!/bin/sh
here=$(dirname "$(readlink -f "$0")")
LD_LIBRARY_PATH="$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" exec "$here/perf_analyzer.bin" "$@"
"""

_CACHE = CACHE / "perf_analyzer"

# How what is measured is asked → as perf_analyzer calls it. Over HTTP it sends and takes binary tensors by itself.
PROTOCOLS = {
    "http": ("-i", "http"),
    "json": ("-i", "http", "--input-tensor-format", "json", "--output-tensor-format", "json"),
    "grpc": ("-i", "grpc"),
}


@dataclass(frozen=True, kw_only=True)
class PerfAnalyzer:
    """A perf_analyzer that was seen to run.

    Attributes:
        executable: The program, which runs as it is.
        source: Where it was found, in words.
    """

    executable: Path
    source: str

    def run(self, arguments: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        """Run it and return what it printed, stderr included."""
        command = [str(self.executable), *arguments]
        return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What perf_analyzer measured at one concurrency."""

    protocol: str
    concurrency: int
    inferences_per_s: float
    p50_ms: float
    p95_ms: float
    p99_ms: float


def find_perf_analyzer() -> PerfAnalyzer:
    """Return the perf_analyzer on PATH or beside this Python if it is the real one, else fetch it from PyPI.

    Raises:
        ClientError: None that runs here can be found or fetched.
    """
    for candidate in (shutil.which("perf_analyzer"), Path(sys.executable).with_name("perf_analyzer")):
        if candidate and Path(candidate).is_file():
            found = PerfAnalyzer(executable=Path(candidate), source="installed")
            if is_real(found):
                return found
    return _fetch()


def is_real(program: PerfAnalyzer) -> bool:
    """Tell whether `program` is NVIDIA's, not the placeholder of the same name, and finds its libraries."""
    try:
        return program.run(["--version"]).stdout.startswith("Perf Analyzer Version")
    except OSError:
        return False


def measure_texts(
    program: PerfAnalyzer,
    *,
    model: Model,
    url: str,
    protocol: str,
    texts: Sequence[str],
    concurrency: int,
    request_count: int,
) -> Measurement:
    """Send requests of one text each, or one pair of it, `concurrency` at a time, going through `texts` in turn.

    Three windows of at least `request_count` requests are averaged. (With --request-count perf_analyzer would divide
    by a whole number of seconds, and the rates would come out in steps.)

    Raises:
        ClientError: perf_analyzer fails, or a request does.
    """
    with tempfile.TemporaryDirectory() as folder:
        data, report = Path(folder, "texts.json"), Path(folder, "report.csv")
        rows = [{name: [text] for name in model.texts} for text in texts]
        data.write_text(json.dumps({"data": rows}), encoding="utf-8")
        options = ["-m", model.name, "-u", url, *PROTOCOLS[protocol], "--input-data", str(data), "-f", str(report)]
        options += ["--concurrency-range", str(concurrency)]
        options += ["--measurement-mode", "count_windows", "--measurement-request-count", str(request_count)]
        # Every window counts, however much they differ: on a busy machine one may be many times as slow as the next.
        options += ["--stability-percentage", "1000000", "--max-trials", "10"]
        result = program.run(options)
        if result.returncode != 0 or not report.is_file():
            lines = [line for line in result.stdout.splitlines() if line.strip()]
            raise ClientError(
                f"perf_analyzer failed on {model.name} at {url} over {protocol}",
                expected="a report",
                got=f"exit code {result.returncode} and {' / '.join(lines[-3:])!r}",
            )
        row = next(csv.DictReader(report.read_text(encoding="utf-8").splitlines()))
    return Measurement(
        protocol=protocol,
        concurrency=concurrency,
        inferences_per_s=float(row["Inferences/Second"]),
        p50_ms=float(row["p50 latency"]) / 1000,
        p95_ms=float(row["p95 latency"]) / 1000,
        p99_ms=float(row["p99 latency"]) / 1000,
    )


def _fetch() -> PerfAnalyzer:
    executable, binary, libraries = _CACHE / "perf_analyzer", _CACHE / "perf_analyzer.bin", _CACHE / "lib"
    if not binary.is_file():
        _CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_CACHE) as folder:
            _download(Path(folder)).rename(binary)
    _link_libraries(binary, libraries)
    executable.write_text(_WRAPPER, encoding="utf-8")
    executable.chmod(0o755)
    program = PerfAnalyzer(executable=executable, source=f"from the wheel {_WHEEL}")
    if not is_real(program):
        raise ClientError(
            f"{executable} does not run here",
            expected="its version",
            got=repr(program.run(["--version"]).stdout.strip()),
            remedy="put a perf_analyzer on PATH, or install modelyard[server], which brings its libraries",
        )
    return program


def _download(folder: Path) -> Path:
    """Return the program, fetched into `folder`."""
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{_WHEEL} --hash=sha256:{_WHEEL_SHA256}\n", encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    options = ["--platform", _WHEEL_PLATFORM, "--require-hashes", "--requirement", str(wanted), "--dest", str(folder)]
    # What pip has to say is told where it fails.
    done = subprocess.run([*pip, *options], capture_output=True, text=True, check=False)
    wheel = next(folder.glob("*.whl"), None)
    if done.returncode or wheel is None:
        errors = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        raise ClientError(
            "perf_analyzer cannot be fetched",
            expected=f"pip to download {_WHEEL}",
            got=repr((errors or [f"exit code {done.returncode}"])[-1]),
            remedy="put a perf_analyzer on PATH",
        )
    shutil.unpack_archive(wheel, folder, format="zip")
    fetched = next(folder.glob("*.data/data/bin/perf_analyzer"))
    fetched.chmod(0o755)
    return fetched


def _link_libraries(executable: Path, libraries: Path) -> None:
    """Fill `libraries` with links to what the system lacks and the wheel nvidia-pytriton carries under other names."""
    libraries.mkdir(exist_ok=True)
    for old in libraries.iterdir():
        old.unlink()
    spec = importlib.util.find_spec("pytriton")
    carried = [
        path
        for location in (spec.submodule_search_locations or [] if spec else [])
        for path in Path(location).with_name("nvidia_pytriton.libs").iterdir()
    ]
    linked = subprocess.run(["ldd", str(executable)], stdout=subprocess.PIPE, text=True, check=False).stdout
    for name in re.findall(r"(\S+) => not found", linked):
        # auditwheel puts a hash into the name: libb64.so.0d becomes libb64-98cb6333.so.0d.
        stem, _, suffix = name.partition(".so")
        pattern = re.compile(re.escape(stem) + r"-[0-9a-f]{8}\.so" + re.escape(suffix))
        for path in carried:
            if pattern.match(path.name):
                (libraries / name).symlink_to(path)
