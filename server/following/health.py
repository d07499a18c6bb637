"""Whether a running model answers as it was verified when it was published."""

import base64
import http.client
import io
import json
import struct
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from modelyard.exchange import WatchedRequest, fetch
from modelyard.recorded_answers import measure_answer

from ..errors import GoldenError
from ..tritonserver.backend_processes import EndWatch
from .recorded import DamagedGoldenError, read_golden
from .sums import GOLDEN_FILE, hash_file, read_sums

# A first inference may have to wait for a warmup or a cold disk.
_TIMEOUT_S = 60.0

# For how long a full queue is asked again, which says nothing of the answer: where somebody waits for a word, and where
# a version is judged once for good.
_PATIENCE_S = 4.0
JUDGING_PATIENCE_S = 30.0
_PAUSE_S = 0.2

# Asks a model with a body and headers.
_Post = Callable[[str, tuple[bytes, dict[str, str]]], bytes]

# What an answer is compared by.
_OF_TENSOR = ("name", "shape", "data")


class _BusyError(OSError):
    """The server answers, and has no place for one more request."""


class LostServerError(ConnectionError):
    """The server listens no more, or hangs up before it has answered."""


class LostProcessError(OSError):
    """A process that was asked has ended."""


def check_answer(
    url: str,
    repository: Path,
    name: str,
    version: str,
    *,
    served_as: str | None = None,
    patience_s: float = _PATIENCE_S,
    watch: EndWatch | None = None,
) -> float | None:
    """Ask a model for an answer that was recorded when it was verified.

    Args:
        url: Of the server's HTTP port.
        repository: Where the model is published.
        name: Its name there.
        version: Which version of it.
        served_as: The name under which the server has it, where that is another.
        patience_s: For how many seconds it is asked again where its queue is full.
        watch: Tells whether its processes have ended; None where they are not known.

    Returns:
        The largest difference to it, as `measure_answer` counts it; None where nothing was recorded.

    Raises:
        LostServerError: There is no server any more.
        LostProcessError: A process of the model has ended instead of answering.
        OSError: The server does not answer, or refuses.
        ValueError: It answers something else than the file promises, or the file is not one of this modelyard.
    """
    path = repository / name / version / GOLDEN_FILE
    try:
        if not path.exists():
            return None
        golden = read_golden(path)
        post = partial(_post, f"{url}/v2/models/{served_as or name}/versions/{version}", watch)
        return _compare(post, golden, patience_s)
    except (_BusyError, LostServerError, LostProcessError, GoldenError, DamagedGoldenError):
        raise
    # What is recorded may be of another kind than what is answered: any fault may come of it.
    except Exception as exc:
        told = str(exc) if isinstance(exc, (OSError, ValueError)) else f"{type(exc).__name__}: {exc}"
        if _has_changed(path):
            raise DamagedGoldenError(f"{path} has changed since it was published: {told}") from exc
        kind = OSError if isinstance(exc, OSError) else ValueError
        raise kind(f"{told}; what was verified is in {path}") from exc


def _compare(post: _Post, golden: Mapping[str, Any], patience_s: float) -> float:
    """Return how far a version of a model, asked by `post`, is from the first of its recorded answers."""
    # It is an answer with numbers in it.
    sample = golden["samples"][0]
    ask = _generate if golden.get("decoupled") else _infer
    end = time.monotonic() + patience_s
    while True:
        try:
            return measure_answer(sample["outputs"], ask(post, sample), golden["tolerances"])
        except _BusyError:
            if time.monotonic() >= end:
                raise
            time.sleep(_PAUSE_S)


def _has_changed(path: Path) -> bool:
    """Tell whether a file of a version is known to have other bytes than were published; one without a sum is not."""
    try:
        return read_sums(path.parent).get(path) not in (None, hash_file(path))
    # Of what cannot be read nothing is known.
    except OSError:
        return not path.is_file()


def _infer(post: _Post, sample: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tensors that a sample's request is answered with."""
    outputs = [
        {"name": tensor["name"], **({"parameters": {"binary_data": True}} if tensor["datatype"] == "FP16" else {})}
        for tensor in sample["outputs"]
    ]
    answer = post("infer", _build_request(sample["inputs"], outputs))
    header, binary = _split(answer)
    return _pick(header, lambda told: [_read_tensor(tensor, binary) for tensor in told["outputs"]])


def _split(answer: bytes) -> tuple[bytes, io.BytesIO]:
    """Return the JSON of an answer, and what stands behind it."""
    try:
        # One byte a character, so that the end of the one is the place of the other.
        _, end = json.JSONDecoder().raw_decode(answer.decode("latin-1"))
    except (ValueError, RecursionError):
        # It is none, which whoever reads it says.
        end = len(answer)
    return answer[:end], io.BytesIO(answer[end:])


def _read_tensor(tensor: Mapping[str, Any], binary: io.BytesIO) -> dict[str, Any]:
    """Return an output with its values, those of 16-bit floats from behind the JSON, where they stand in its order."""
    size = tensor.get("parameters", {}).get("binary_data_size")
    data = tensor["data"] if size is None else [value for (value,) in struct.iter_unpack("<e", binary.read(size))]
    return {**{key: tensor[key] for key in _OF_TENSOR if key != "data"}, "data": data}


def _generate(post: _Post, sample: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the same of a decoupled model, which tritonserver answers for under another address alone.

    There a tensor of one value is that value, under its name.
    """
    asked = {tensor["name"]: tensor["data"][0] for tensor in sample["inputs"]}
    headers = {"Content-Type": "application/json"}
    answer = post("generate", (json.dumps(asked).encode(), headers))
    return _pick(answer, lambda told: [{**tensor, "data": [told.get(tensor["name"])]} for tensor in sample["outputs"]])


def _pick(answer: bytes, pick: Callable[[Any], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return what `pick` takes from an answer in JSON.

    Raises:
        ValueError: There are no tensors in it: it may be another program's.
    """
    try:
        return pick(json.loads(answer))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as exc:
        told = f"'{answer[:100].decode(errors='replace')}'" if answer else "nothing"
        raise ValueError(f"expected tensors, got {told}") from exc


def _build_request(inputs: list[dict[str, Any]], outputs: list[dict[str, Any]]) -> tuple[bytes, dict[str, str]]:
    """Return body and headers of a request; what tritonserver takes in no JSON goes behind it, as bytes."""
    listed, content = [], b""
    for tensor in inputs:
        binary = _pack(tensor)
        if binary is None:
            listed.append(tensor)
            continue
        described = {key: tensor[key] for key in ("name", "shape", "datatype")}
        listed.append(described | {"parameters": {"binary_data_size": len(binary)}})
        content += binary
    header = json.dumps({"inputs": listed, "outputs": outputs}).encode()
    if not content:
        return header, {"Content-Type": "application/json"}
    headers = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(len(header))}
    return header + content, headers


def _pack(tensor: Mapping[str, Any]) -> bytes | None:
    """Return values as KServe's extension for binary tensors writes them: 16-bit floats, and what is in base64."""
    if tensor["datatype"] == "FP16":
        return struct.pack(f"<{len(tensor['data'])}e", *tensor["data"])
    if tensor.get("parameters", {}).get("encoding") != "base64":
        return None
    values = [base64.b64decode(text) for text in tensor["data"]]
    # The length of each string in front of it.
    return b"".join(struct.pack("<I", len(value)) + value for value in values)


def _post(model_url: str, watch: EndWatch | None, what: str, request_parts: tuple[bytes, dict[str, str]]) -> bytes:
    body, headers = request_parts
    gives_up = watch.has_ended if watch else lambda: False
    try:
        return fetch(WatchedRequest(f"{model_url}/{what}", body, headers, gives_up), _TIMEOUT_S)
    except urllib.error.HTTPError as exc:
        if watch and watch.look():
            raise LostProcessError(watch.end) from exc
        refused = _BusyError if exc.code == http.HTTPStatus.SERVICE_UNAVAILABLE else OSError
        raise refused(f"HTTP {exc.code}: {exc.read(500).decode(errors='replace')}") from exc
    except (http.client.HTTPException, OSError) as exc:
        if watch and watch.end:
            raise LostProcessError(watch.end) from exc
        # urllib wraps what it met.
        cause = getattr(exc, "reason", exc)
        if isinstance(cause, (ConnectionError, http.client.IncompleteRead)):
            raise LostServerError(str(cause)) from exc
        if isinstance(exc, OSError):
            raise
        raise OSError(f"no HTTP: {exc!r}") from exc
