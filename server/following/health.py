"""Whether a running server answers, and answers what was verified when the model was published."""

import base64
import hashlib
import http.client
import json
import math
import os
import struct
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckError, GoldenError
from ..locations import name_command
from .agreement import find_disagreement, read_following
from .model_text import CONFIG_FILE, read_config
from .published import GOLDEN_FILE, SUMS_FILE, read_repository

# A first inference may have to wait for a warmup or a cold disk.
_TIMEOUT_S = 60.0
_METADATA_TIMEOUT_S = 5.0

# For how long a full queue is asked again, which says nothing of the answer: where somebody waits for a word, and where
# a version is judged once for good.
_PATIENCE_S = 4.0
JUDGING_PATIENCE_S = 30.0
_PAUSE_S = 0.2


# Above the largest number of fp32.
_BEYOND_FP32 = 1e39

# KServe's datatypes that a recorded tensor may have, and whether a value of its `data` is of one.
_DATATYPES: Mapping[str, Callable[[object], bool]] = {
    "BYTES": lambda value: isinstance(value, str),
    "BOOL": lambda value: isinstance(value, int),
    **{f"FP{bits}": lambda value: _is_number(value) for bits in (16, 32, 64)},
    **{
        f"{sign}INT{bits}": lambda value: isinstance(value, int) and not isinstance(value, bool)
        for sign in ("", "U")
        for bits in (8, 16, 32, 64)
    },
}


class DamagedGoldenError(ValueError):
    """A `golden.json` says nothing that could be asked."""


class _DamageError(ValueError):
    """A model has files that are not as they were published."""


class _BusyError(OSError):
    """The server answers, and has no place for one more request."""


def check_answer(
    url: str,
    repository: Path,
    name: str,
    version: str,
    *,
    served_as: str | None = None,
    patience_s: float = _PATIENCE_S,
) -> float | None:
    """Ask a model for an answer that was recorded when it was verified.

    Args:
        url: Of the server's HTTP port.
        repository: Where the model is published.
        name: Its name there.
        version: Which version of it.
        served_as: The name under which the server has it, where that is another.
        patience_s: For how many seconds it is asked again where its queue is full.

    Returns:
        The largest difference to it, as `measure_answer` counts it; None where nothing was recorded.

    Raises:
        OSError: The server does not answer, or refuses.
        ValueError: It answers something else than the file promises, or the file is not one of this modelyard.
    """
    path = repository / name / version / GOLDEN_FILE
    try:
        if not path.exists():
            return None
        golden = read_golden(path)
        return _compare(f"{url}/v2/models/{served_as or name}/versions/{version}", golden, patience_s)
    except (_BusyError, GoldenError, DamagedGoldenError):
        raise
    # What is recorded may be of another kind than what is answered: any fault may come of it.
    except Exception as exc:
        told = str(exc) if isinstance(exc, (OSError, ValueError)) else f"{type(exc).__name__}: {exc}"
        if _has_changed(path):
            raise DamagedGoldenError(f"{path} has changed since it was published: {told}") from exc
        kind = OSError if isinstance(exc, OSError) else ValueError
        raise kind(f"{told}; what was verified is in {path}") from exc


def _compare(url: str, golden: Mapping[str, Any], patience_s: float) -> float:
    """Return how far a version of a model, at `url`, is from the first of its recorded answers."""
    # It is an answer with numbers in it.
    sample = golden["samples"][0]
    ask = _generate if golden.get("decoupled") else _infer
    end = time.monotonic() + patience_s
    while True:
        try:
            return measure_answer(sample["outputs"], ask(url, sample), golden["tolerances"])
        except _BusyError:
            if time.monotonic() >= end:
                raise
            time.sleep(_PAUSE_S)


def _has_changed(path: Path) -> bool:
    """Tell whether a file of a version is known to have other bytes than were published; one without a sum is not."""
    try:
        lines = read_config(path.with_name(SUMS_FILE)).splitlines()
        sums = {place: digest for digest, _, place in (line.partition("  ") for line in lines)}
        return sums.get(path.name) not in (None, hashlib.sha256(path.read_bytes()).hexdigest())
    # Of what cannot be read nothing is known.
    except (OSError, ValueError):
        return not path.is_file()


def _infer(url: str, sample: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tensors that a sample's request is answered with."""
    outputs = [{"name": tensor["name"]} for tensor in sample["outputs"]]
    answered: list[dict[str, Any]] = _post(f"{url}/infer", _build_request(sample["inputs"], outputs))["outputs"]
    return answered


def _generate(url: str, sample: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the same of a decoupled model, which tritonserver answers for under another address alone.

    There a tensor of one value is that value, under its name.
    """
    asked = {tensor["name"]: tensor["data"][0] for tensor in sample["inputs"]}
    headers = {"Content-Type": "application/json"}
    answered = _post(f"{url}/generate", (json.dumps(asked).encode(), headers))
    return [{**tensor, "data": [answered.get(tensor["name"])]} for tensor in sample["outputs"]]


_EXPECTED_GOLDEN = "expected samples of whole tensors and tolerances, got something else"


def read_golden(path: Path) -> dict[str, Any]:
    """Return what a `golden.json` holds, which docs/contracts.md describes.

    Raises:
        GoldenError: An older modelyard wrote it.
        DamagedGoldenError: It holds no such thing.
    """
    if not path.is_file():
        raise DamagedGoldenError(f"{path} is damaged: it is no regular file")
    if not os.access(path, os.R_OK):
        raise DamagedGoldenError(f"{path} cannot be read: Permission denied")
    try:
        golden: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        samples, bounds = golden["samples"], golden["tolerances"]
        is_old = not all({"inputs", "outputs"} <= sample.keys() for sample in samples)
        is_whole = is_old or (bool(samples) and all(map(_is_whole_sample, samples)) and _are_bounds(bounds))
    except ValueError as exc:
        raise DamagedGoldenError(f"{path} is damaged: expected JSON, got {exc}") from exc
    # A file that was written over may hold anything.
    except (TypeError, LookupError, AttributeError, RecursionError) as exc:
        raise DamagedGoldenError(f"{path} is damaged: {_EXPECTED_GOLDEN}") from exc
    if is_old:
        raise GoldenError(
            f"{path} was written by an older modelyard",
            expected="samples of inputs and outputs",
            got=", ".join(golden["samples"][0]),
            remedy=f"export the model again with `{name_command('run')}`",
        )
    if not is_whole:
        raise DamagedGoldenError(f"{path} is damaged: {_EXPECTED_GOLDEN}")
    return golden


def _is_whole_sample(sample: Mapping[str, Any]) -> bool:
    """Tell whether a recorded request and its answer can be asked and compared."""
    return bool(sample["outputs"]) and all(map(_is_whole_tensor, [*sample["inputs"], *sample["outputs"]]))


def _is_whole_tensor(tensor: Mapping[str, Any]) -> bool:
    """Tell whether a recorded tensor has as many values as its shape says, each of its datatype.

    tritonserver makes room for a shape before it looks at the values, and ends where it cannot.
    """
    shape, data, is_one = tensor["shape"], tensor["data"], _DATATYPES[tensor["datatype"]]
    return (
        isinstance(tensor["name"], str)
        and isinstance(shape, list)
        and all(type(size) is int and size >= 0 for size in shape)
        and isinstance(data, list)
        and math.prod(shape) == len(data)
        and all(map(is_one, data))
        and (tensor.get("parameters", {}) == {} or _is_base64(tensor))
    )


def _is_base64(tensor: Mapping[str, Any]) -> bool:
    """Tell whether a tensor says that its values are in base64, and they are."""
    if tensor["parameters"] != {"encoding": "base64"}:
        return False
    for text in tensor["data"]:
        base64.b64decode(text, validate=True)
    return True


def _are_bounds(tolerances: Mapping[str, Any]) -> bool:
    given = [tolerances[key] for key in ("max_abs_error", "max_relative_error") if key in tolerances]
    return bool(given) and all(_is_number(value) and value >= 0 for value in given)


def _is_number(value: object) -> bool:
    """Tell whether `value` is a number that fp32 has; NaN is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _BEYOND_FP32


def measure_answer(expected: list[dict[str, Any]], got: list[dict[str, Any]], tolerances: Mapping[str, float]) -> float:
    """Return the largest difference between recorded outputs and those of a server, as the tolerances count it.

    Args:
        expected: KServe v2 tensors.
        got: The same, in any order.
        tolerances: Of the `golden.json`.

    Raises:
        ValueError: One is missing, has another shape, or is too far off.
    """
    given = {tensor["name"]: tensor for tensor in got}
    # Tensors of any meaning are compared in parts of their largest value.
    is_relative = "max_relative_error" in tolerances
    bound = tolerances["max_relative_error" if is_relative else "max_abs_error"]
    has_scores = any(tensor["datatype"].startswith("FP") for tensor in expected)
    worst = 0.0
    for tensor in expected:
        name = tensor["name"]
        answer = given.get(name, {"shape": "none", "data": []})
        if answer["shape"] != tensor["shape"]:
            raise ValueError(f"expected {name} of shape {tensor['shape']}, got {answer['shape']}")
        want, have = tensor["data"], answer["data"]
        if not is_relative and not tensor["datatype"].startswith("FP"):
            # Labels and places go with the scores, and change theirs where two scores are as good as equal.
            if not has_scores and have != want:
                raise ValueError(f"expected the verified {name}, got another")
            continue
        if is_relative:
            largest = max(map(abs, want), default=0.0) or 1.0
            want, have = [value / largest for value in want], [value / largest for value in have]
        # Vectors have a direction; scores are compared as they are.
        elif "min_cosine" in tolerances:
            want, have = _normalize(want), _normalize(have)
        errors = [abs(a - b) for a, b in zip(have, want, strict=True)]
        # Written so that NaN fails as well, which `max` alone may lose.
        wrong = [error for error in errors if not error <= bound]
        if wrong:
            raise ValueError(f"expected the verified {name} within {bound}, got {max(wrong):.1e}")
        worst = max(worst, *errors, 0.0)
    return worst


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What came of asking a model.

    Attributes:
        error: The largest difference to the verified answer; NaN where none could be asked for, and the model is ready.
        served: The version that answered.
        active: The version that is active in the repository.
        disagreement: Why the one is not the other, where it has not just become so.
    """

    error: float
    served: int
    active: int
    disagreement: str = ""


def check_ensembles(
    url: str, repository: Path, status_url: str | None = None, *, any_version: bool = False
) -> dict[str, Checked]:
    """Ask every active model of `repository`, ensembles and lone graphs, for its verified answer.

    Args:
        url: Of the server's HTTP port.
        repository: Where the models are published.
        status_url: Of its status port, which tells how far it follows the repository.
        any_version: Whether a model may answer from another version than the active one for good.

    Returns:
        Name to what came of it.

    Raises:
        CheckError: One of them does not answer, or otherwise, or another version than the active one for longer than
            a rollout takes, or there is none to ask.
    """
    if not repository.is_dir():
        raise CheckError(
            f"there is no repository {repository}",
            expected="the folder that the server serves",
            got="a file" if repository.exists() else "nothing",
            remedy="name it with --repository",
        )
    published = {path.parent.parent for path in repository.glob(f"*/*/{GOLDEN_FILE}")}
    # One of which no version is active has no configuration.
    names = sorted(folder.name for folder in published if os.path.lexists(folder / CONFIG_FILE))
    try:
        wanted = read_repository(repository)
    except OSError as exc:
        raise CheckError(
            f"{repository} cannot be read",
            expected="a folder that this user may read",
            got=f"'{exc.strerror}'",
            remedy="open it, or check as its owner",
        ) from exc
    active = {name: wanted[name].version if name in wanted else 0 for name in names}
    following = read_following(status_url) if status_url else {}
    reasons = {name: str(each.get("reason", "")) for name, each in following.items() if each.get("state") == "failed"}
    # Of one without a configuration or a version, which may be there again, the server knows that it was to be served;
    # what this project did not write has no version.
    lost = {folder.name for folder in published} | {name for name in reasons if following[name].get("served")}
    faults = {name: reasons[name] for name in reasons.keys() & (lost - {*names})}
    faults |= {name: each.damage for name, each in wanted.items() if each.damage}
    checked, failures, remedy = dict[str, Checked](), [], "see the server's log"
    for name in [*faults, *(name for name in names if name not in faults)]:
        try:
            if name in faults:
                raise _DamageError(faults[name].rstrip("."))
            version = _read_version(url, name)
            error = check_answer(url, repository, name, version)
            if error is None:
                raise ValueError(f"version {version} has no {GOLDEN_FILE}")
            reason = find_disagreement(repository, name, active[name], int(version), following)
            if reason and not any_version:
                raise ValueError(reason)
            checked[name] = Checked(error=error, served=int(version), active=active[name], disagreement=reason)
        except GoldenError as exc:
            failures.append(f"{name}: {exc.fault}")
            remedy = exc.remedy
        except (_DamageError, DamagedGoldenError) as exc:
            # A server that has it in memory answers all the same.
            if any_version and (served := _find_served(url, name)):
                found = Checked(error=math.nan, served=served, active=active.get(name, 0), disagreement=str(exc))
                checked[name] = found
            else:
                failures.append(f"{name}: {exc}")
        except OSError as exc:
            # Of one that it could not load, the server knows more than that it is not there.
            failures.append(f"{name}: {reasons.get(name) or exc}")
        except (ValueError, KeyError) as exc:
            failures.append(f"{name}: {exc}")
    if failures or not checked:
        raise CheckError(
            f"{url} does not serve {repository} as verified",
            expected="an answer of every ensemble",
            got="; ".join(failures) or f"no ensemble with a {GOLDEN_FILE}",
            remedy=remedy,
        )
    return checked


def _find_served(url: str, name: str) -> int:
    """Return which version of a model answers that it is ready; 0 where none does."""
    try:
        version = _read_version(url, name)
        ready = f"{url}/v2/models/{urllib.parse.quote(name)}/versions/{version}/ready"
        with urllib.request.urlopen(ready, timeout=_METADATA_TIMEOUT_S):
            return int(version)
    except (OSError, ValueError, KeyError, http.client.HTTPException):
        return 0


def _read_version(url: str, name: str) -> str:
    try:
        with urllib.request.urlopen(
            f"{url}/v2/models/{urllib.parse.quote(name)}", timeout=_METADATA_TIMEOUT_S
        ) as response:
            return str(max(json.load(response)["versions"], key=int))
    except http.client.HTTPException as exc:
        raise OSError(f"no HTTP: {exc!r}") from exc


def _build_request(inputs: list[dict[str, Any]], outputs: list[dict[str, Any]]) -> tuple[bytes, dict[str, str]]:
    """Return body and headers of a request; what a `golden.json` holds in base64 goes behind the JSON, as bytes."""
    listed, content = [], b""
    for tensor in inputs:
        if tensor.get("parameters", {}).get("encoding") != "base64":
            listed.append(tensor)
            continue
        values = [base64.b64decode(text) for text in tensor["data"]]
        # As KServe's extension for binary tensors writes strings: the length of each in front of it.
        binary = b"".join(struct.pack("<I", len(value)) + value for value in values)
        described = {key: tensor[key] for key in ("name", "shape", "datatype")}
        listed.append(described | {"parameters": {"binary_data_size": len(binary)}})
        content += binary
    header = json.dumps({"inputs": listed, "outputs": outputs}).encode()
    if not content:
        return header, {"Content-Type": "application/json"}
    headers = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(len(header))}
    return header + content, headers


def _post(url: str, request_parts: tuple[bytes, dict[str, str]]) -> Any:
    body, headers = request_parts
    request = urllib.request.Request(url, data=body, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            return json.load(response)
    except urllib.error.HTTPError as exc:
        refused = _BusyError if exc.code == http.HTTPStatus.SERVICE_UNAVAILABLE else OSError
        raise refused(f"HTTP {exc.code}: {exc.read(500).decode(errors='replace')}") from exc
    except http.client.HTTPException as exc:
        raise OSError(f"no HTTP: {exc!r}") from exc


def _normalize(vector: list[float]) -> list[float]:
    length = math.sqrt(sum(value * value for value in vector)) or math.nan
    return [value / length for value in vector]
