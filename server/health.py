"""Whether a running server answers, and answers what was verified when the model was published."""

import http.client
import json
import math
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from .errors import CheckError

# A first inference may have to wait for a warmup or a cold disk.
_TIMEOUT_S = 60.0
_METADATA_TIMEOUT_S = 5.0


def is_live(url: str) -> bool:
    """Tell whether the server at `url` accepts requests at all."""
    try:
        with urllib.request.urlopen(f"{url}/v2/health/live", timeout=1.0) as response:
            return bool(response.status == 200)
    except (OSError, http.client.HTTPException):
        return False


def check_answer(url: str, repository: Path, name: str, version: str, *, served_as: str | None = None) -> float | None:
    """Ask a model for an answer that was recorded when it was verified.

    Args:
        url: Of the server's HTTP port.
        repository: Where the model is published.
        name: Its name there.
        version: Which version of it.
        served_as: The name under which the server has it, where that is another.

    Returns:
        The largest difference to it, of vectors at length 1; None where nothing was recorded.

    Raises:
        OSError: The server does not answer, or refuses.
        ValueError: It answers something else than the file promises.
    """
    path = repository / name / version / "golden.json"
    if not path.is_file():
        return None
    golden = json.loads(path.read_text(encoding="utf-8"))
    sample = golden["samples"][0]
    model_url = f"{url}/v2/models/{served_as or name}/versions/{version}/infer"
    if "inputs" in sample:
        return _check_tensors(model_url, sample, golden["tolerances"])
    texts = {golden["input"]: sample["text"]} | ({"TEXT_PAIR": sample["pair"]} if "pair" in sample else {})
    body = {
        "inputs": [{"name": k, "shape": [1, 1], "datatype": "BYTES", "data": [text]} for k, text in texts.items()],
        "outputs": [{"name": golden["output"]}],
    }
    answer = _post(model_url, body)
    got, expected = answer["outputs"][0]["data"], sample["expected"]
    if len(got) != len(expected):
        raise ValueError(f"expected {len(expected)} values, got {len(got)}")
    # Vectors have a direction; scores are compared as they are.
    if "min_cosine" in golden["tolerances"]:
        got, expected = _normalize(got), _normalize(expected)
    error: float = max(abs(a - b) for a, b in zip(got, expected, strict=True))
    # Written so that NaN fails as well.
    if not error <= golden["tolerances"]["max_abs_error"]:
        raise ValueError(
            f"expected the verified answer within {golden['tolerances']['max_abs_error']}, got {error:.1e}"
        )
    return error


def _check_tensors(url: str, sample: dict[str, Any], tolerances: dict[str, float]) -> float:
    """Ask for the outputs of recorded tensors, and return the largest difference in parts of an output's largest value.

    Raises:
        OSError: The server does not answer, or refuses.
        ValueError: It answers something else than the file promises.
    """
    outputs = [{"name": tensor["name"]} for tensor in sample["outputs"]]
    answer = _post(url, {"inputs": sample["inputs"], "outputs": outputs})
    got = {tensor["name"]: tensor for tensor in answer["outputs"]}
    worst = 0.0
    for expected in sample["outputs"]:
        tensor = got[expected["name"]]
        if tensor["shape"] != expected["shape"]:
            raise ValueError(f"expected {expected['name']} of shape {expected['shape']}, got {tensor['shape']}")
        largest = max((abs(value) for value in expected["data"]), default=0.0) or 1.0
        pairs = zip(tensor["data"], expected["data"], strict=True)
        error = max((abs(a - b) for a, b in pairs), default=0.0) / largest
        # Written so that NaN fails as well.
        if not error <= tolerances["max_relative_error"]:
            raise ValueError(
                f"expected {expected['name']} within {tolerances['max_relative_error']} of its largest value, "
                f"got {error:.1e}"
            )
        worst = max(worst, error)
    return worst


def check_ensembles(url: str, repository: Path) -> dict[str, float]:
    """Ask every published model of `repository`, ensembles and lone graphs, for its verified answer.

    Returns:
        Name to the largest difference.

    Raises:
        CheckError: One of them does not answer, or otherwise, or there is none to ask.
    """
    names = sorted({path.parent.parent.name for path in repository.glob("*/*/golden.json")})
    errors, failures = {}, []
    for name in names:
        try:
            version = _read_version(url, name)
            error = check_answer(url, repository, name, version)
            if error is None:
                raise ValueError(f"version {version} has no golden.json")
            errors[name] = error
        except (OSError, ValueError, KeyError) as exc:
            failures.append(f"{name}: {exc}")
    if failures or not errors:
        raise CheckError(
            f"{url} does not serve {repository} as verified",
            expected="an answer of every ensemble",
            got="; ".join(failures) or "no ensemble with a golden.json",
            remedy="see the server's log",
        )
    return errors


def _read_version(url: str, name: str) -> str:
    try:
        with urllib.request.urlopen(
            f"{url}/v2/models/{urllib.parse.quote(name)}", timeout=_METADATA_TIMEOUT_S
        ) as response:
            return str(max(json.load(response)["versions"], key=int))
    except http.client.HTTPException as exc:
        raise OSError(f"no HTTP: {exc!r}") from exc


def _post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            return json.load(response)
    except urllib.error.HTTPError as exc:
        raise OSError(f"HTTP {exc.code}: {exc.read(500).decode(errors='replace')}") from exc
    except http.client.HTTPException as exc:
        raise OSError(f"no HTTP: {exc!r}") from exc


def _normalize(vector: list[float]) -> list[float]:
    length = math.sqrt(sum(value * value for value in vector)) or math.nan
    return [value / length for value in vector]
