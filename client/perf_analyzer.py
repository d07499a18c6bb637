"""Finds or fetches NVIDIA's perf_analyzer, and runs it on texts."""

import csv
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .infer import TEXT_INPUT, ClientError
from .locations import CACHE

# The last tritonclient whose wheel carries the program. It runs on every glibc that the server runs on, where the
# distribution perf-analyzer needs glibc 2.38 and is below that, silently, an empty 0.1.0.
_WHEEL = "tritonclient==2.50.0"
_WHEEL_PLATFORM = "manylinux1_x86_64"

_CACHE = CACHE / "perf_analyzer"


@dataclass(frozen=True, kw_only=True)
class PerfAnalyzer:
    """A perf_analyzer that was seen to run.

    Attributes:
        executable: The program.
        libraries: Folder with what it needs beyond the system's libraries, or None.
        source: Where it was found, for people.
    """

    executable: Path
    libraries: Path | None
    source: str

    def run(self, arguments: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        """Run it and return what it printed, stderr included."""
        environment = dict(os.environ)
        if self.libraries:
            folders = [str(self.libraries), environment.get("LD_LIBRARY_PATH", "")]
            environment["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, folders))
        command = [str(self.executable), *arguments]
        return subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )


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
        ClientError: None can be had that runs here.
    """
    for candidate in (shutil.which("perf_analyzer"), Path(sys.executable).with_name("perf_analyzer")):
        if candidate and Path(candidate).is_file():
            found = PerfAnalyzer(executable=Path(candidate), libraries=None, source="installed")
            if is_real(found):
                return found
    return _fetch()


def is_real(program: PerfAnalyzer) -> bool:
    """Tell whether `program` is NVIDIA's, not the placeholder that bears its name, and finds its libraries."""
    try:
        return program.run(["--version"]).stdout.startswith("Perf Analyzer Version")
    except OSError:
        return False


def measure_texts(
    program: PerfAnalyzer,
    *,
    model: str,
    url: str,
    protocol: str,
    texts: Sequence[str],
    concurrency: int,
    request_count: int,
) -> Measurement:
    """Send requests of one text each, `concurrency` at a time, going through `texts` in turn.

    Three windows of at least `request_count` requests are averaged. (With --request-count perf_analyzer would divide
    by a whole number of seconds, and the rates would come out in steps.)

    Raises:
        ClientError: perf_analyzer fails, or a request does.
    """
    with tempfile.TemporaryDirectory() as folder:
        data, report = Path(folder, "texts.json"), Path(folder, "report.csv")
        data.write_text(json.dumps({"data": [{TEXT_INPUT: [text]} for text in texts]}), encoding="utf-8")
        options = ["-m", model, "-u", url, "-i", protocol, "--input-data", str(data), "-f", str(report)]
        options += ["--concurrency-range", str(concurrency)]
        options += ["--measurement-mode", "count_windows", "--measurement-request-count", str(request_count)]
        # Every window counts, however much they differ: on a busy machine one may be many times as slow as the next.
        options += ["--stability-percentage", "1000000", "--max-trials", "10"]
        result = program.run(options)
        if result.returncode != 0 or not report.is_file():
            lines = [line for line in result.stdout.splitlines() if line.strip()]
            raise ClientError(
                f"perf_analyzer failed on {model} at {url} over {protocol}: expected a report, "
                f"got exit code {result.returncode} and {' / '.join(lines[-3:])!r}."
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
    executable, libraries = _CACHE / "perf_analyzer", _CACHE / "lib"
    if not executable.is_file():
        _CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_CACHE) as folder:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--platform", _WHEEL_PLATFORM]
            download = subprocess.run([*pip, "--dest", folder, _WHEEL], stdout=sys.stderr, check=False)
            wheels = list(Path(folder).glob("*.whl"))
            if download.returncode or not wheels:
                raise ClientError(
                    f"perf_analyzer cannot be fetched: expected pip to download {_WHEEL}, got exit code "
                    f"{download.returncode}; put a perf_analyzer on PATH."
                )
            shutil.unpack_archive(wheels[0], folder, format="zip")
            fetched = next(Path(folder).glob("*.data/data/bin/perf_analyzer"))
            fetched.chmod(0o755)
            fetched.rename(executable)
    _link_libraries(executable, libraries)
    program = PerfAnalyzer(executable=executable, libraries=libraries, source=f"from the wheel {_WHEEL}")
    if not is_real(program):
        raise ClientError(
            f"{executable} does not run here: expected its version, got {program.run(['--version']).stdout.strip()!r}; "
            f"put a perf_analyzer on PATH."
        )
    return program


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
