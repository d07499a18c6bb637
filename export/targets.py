"""The Triton releases that artefacts are written for, and what each of them can load."""

import difflib
import re
from dataclasses import dataclass

from .errors import TargetError


@dataclass(frozen=True, kw_only=True)
class Target:
    """One Triton release.

    Attributes:
        release: Tag of the container, year and month.
        server_version: What `/v2` answers as version.
        onnxruntime_version: The ONNX Runtime that its native backend is built with.
        max_opset: The highest ONNX opset which that runtime loads.
        max_ir_version: The highest ONNX IR version which that runtime loads.
        tensorrt_version: The TensorRT in its image `-py3`, in as many parts as are known; None where none is known.
            (The image `-trtllm-python-py3` holds an older one.) A plan is loaded by the TensorRT that built it.
        python_version: The Python that its Python backend runs.
    """

    release: str
    server_version: str
    onnxruntime_version: str
    max_opset: int
    max_ir_version: int
    tensorrt_version: str | None
    python_version: str


# ONNX Runtime → highest opset and IR version of a graph that its wheel loads; measured, `make targets` does it again.
_CAPS = {
    "1.19.2": (21, 10),
    "1.20.1": (21, 10),
    "1.21.0": (22, 10),
    "1.22.0": (22, 10),
    "1.23.0": (23, 11),
    "1.23.1": (23, 11),
    "1.23.2": (23, 11),
    "1.24.1": (25, 13),
    "1.24.2": (25, 13),
    "1.24.4": (25, 13),
    "1.27.0": (26, 13),
}

# ONNX Runtime, Python: docs/introduction/compatibility.md of triton-inference-server/server at the commit 0f963c9, its
# tables "ONNX Runtime Versions" and "vllm-python-py3", whose Python is that of `-py3`. `ort_version` in build.py at the
# tags from v2.51.0 on agrees. 25.08 is built from the commit 1d1712fdaf shortly before ONNX Runtime 1.23.0, whose wheel
# stands in for it.
# Server: one minor version a release, seen for 24.10 (its wheel), 24.12 and 25.01 (the names of NVIDIA's archived
# documentation), 25.03 (build.py), 26.04, 26.06 and 26.07 (the repositories of Triton). From 2.56 to 2.68 there is one
# minor version less than there are releases: 25.07, which has no tritonclient of its own on PyPI, is taken for 2.59.1.
# TensorRT: NVIDIA's support matrix could not be read. Public repositories that name the image and what is in it,
# for 24.10, 25.07, 26.02 and 26.07 `tritonserver:YY.MM-py3`, for 25.09 the vLLM image, for the others
# `tensorrt:YY.MM-py3`, which is made to fit (issue 5812 of the server). For the Nones no such repository was found.
_RELEASES: list[tuple[str, str, str, str | None, str]] = [
    ("24.10", "2.51.0", "1.19.2", "10.5", "3.10.12"),
    ("24.11", "2.52.0", "1.19.2", "10.6", "3.12.3"),
    ("24.12", "2.53.0", "1.20.1", None, "3.12.3"),
    ("25.01", "2.54.0", "1.20.1", "10.8.0.43", "3.12.3"),
    ("25.02", "2.55.0", "1.20.1", "10.8.0", "3.12.3"),
    ("25.03", "2.56.0", "1.21.0", "10.9", "3.12.3"),
    ("25.04", "2.57.0", "1.21.0", "10.9.0", "3.12.3"),
    ("25.05", "2.58.0", "1.22.0", None, "3.12.3"),
    ("25.06", "2.59.0", "1.22.0", "10.11.0", "3.12.3"),
    ("25.07", "2.59.1", "1.22.0", "10.11.0.33", "3.12.3"),
    ("25.08", "2.60.0", "1.23.0", None, "3.12.3"),
    ("25.09", "2.61.0", "1.23.0", "10.13.3.9", "3.12.3"),
    ("25.10", "2.62.0", "1.23.1", "10.13.3", "3.12.3"),
    ("25.11", "2.63.0", "1.23.2", "10.14.1", "3.12.3"),
    ("25.12", "2.64.0", "1.23.2", "10.14.1", "3.12.3"),
    ("26.01", "2.65.0", "1.23.2", None, "3.12.3"),
    ("26.02", "2.66.0", "1.24.1", "10.15.1.29", "3.12.3"),
    ("26.03", "2.67.0", "1.24.2", "10.16.0.72", "3.12.3"),
    ("26.04", "2.68.0", "1.24.4", "10.16.1", "3.12.3"),
    ("26.05", "2.69.0", "1.24.4", "10.16.1.11", "3.12.3"),
    ("26.06", "2.70.0", "1.24.4", "11.0.0.114", "3.12.3"),
    ("26.07", "2.71.0", "1.27.0", "11.1.0.106", "3.12.3"),
]

TARGETS = tuple(
    Target(
        release=release,
        server_version=server,
        onnxruntime_version=onnxruntime,
        max_opset=_CAPS[onnxruntime][0],
        max_ir_version=_CAPS[onnxruntime][1],
        tensorrt_version=tensorrt,
        python_version=python,
    )
    for release, server, onnxruntime, tensorrt, python in _RELEASES
)
"""Every known release, oldest first."""

DEFAULT_TARGET = TARGETS[0]
"""What `server/` and `docker/` run."""


def find_target(release: str) -> Target:
    """Return the target called `release`, such as `24.10`.

    Raises:
        TargetError: There is none; names the nearest.
    """
    for target in TARGETS:
        if target.release == release:
            return target
    raise TargetError(
        f"the target {release!r} is not a known Triton release",
        expected=f"one from {TARGETS[0].release} to {TARGETS[-1].release}",
        got=release or "nothing",
        remedy=f"the nearest is {_find_nearest(release).release}",
    )


def find_releases_for(opset: int, ir_version: int) -> list[Target]:
    """Return every target that loads a graph of this opset and IR version, oldest first."""
    return [target for target in TARGETS if opset <= target.max_opset and ir_version <= target.max_ir_version]


def require_fits(file_name: str, opset: int, ir_version: int, target: Target) -> None:
    """Refuse a graph that is newer than what `target` loads.

    Args:
        file_name: Name of the graph's file, for the message.
        opset: The version of the default operator set that the graph imports.
        ir_version: The IR version that the file names.
        target: The release that is to run it.

    Raises:
        TargetError: Names the newest release that would do and the oldest that works.
    """
    if opset <= target.max_opset and ir_version <= target.max_ir_version:
        return
    fitting = [other.release for other in find_releases_for(opset, ir_version)]
    if not fitting:
        remedy = f"export it with a lower opset: no release up to {TARGETS[-1].release} loads it"
    elif len(fitting) == 1:
        remedy = f"pass --target {fitting[0]}, the only release that loads it"
    else:
        remedy = f"pass --target {fitting[-1]}, the newest release that loads it, or {fitting[0]}, the oldest"
    raise TargetError(
        f"{file_name} is too new for Triton {target.release}",
        expected=f"at most opset {target.max_opset} and IR version {target.max_ir_version}",
        got=f"opset {opset} and IR version {ir_version}",
        remedy=remedy,
    )


def _find_nearest(release: str) -> Target:
    """Return the target nearest in time, or in spelling where `release` is not a date."""
    if match := re.search(r"(\d\d)\.(\d\d)(?!\d)", release):
        wanted = _count_months(match[0])
        return min(TARGETS, key=lambda target: abs(_count_months(target.release) - wanted))
    names = {target.release: target for target in TARGETS}
    close = difflib.get_close_matches(release, names, n=1)
    return names[close[0]] if close else DEFAULT_TARGET


def _count_months(release: str) -> int:
    year, month = release.split(".")
    return 12 * int(year) + int(month)
