"""Whether a running server answers, and answers what was verified when the model was published."""

import json
import math
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# A first inference may have to wait for a warmup or a cold disk.
_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class ModelState:
    """What the server says of one version of a model."""

    name: str
    version: str
    state: str
    reason: str

    @property
    def ready(self) -> bool:
        """Whether requests are accepted."""
        return self.state == "READY"


def is_live(url: str) -> bool:
    """Tell whether the server at `url` accepts requests at all."""
    try:
        with urllib.request.urlopen(f"{url}/v2/health/live", timeout=1.0) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def read_states(url: str) -> list[ModelState]:
    """Return the state of every model that was asked for."""
    entries = _post(f"{url}/v2/repository/index", {})
    return [
        ModelState(
            name=entry["name"],
            version=entry.get("version", ""),
            state=entry.get("state", "NOT LOADED"),
            reason=entry.get("reason", ""),
        )
        for entry in entries
    ]


def check_answer(url: str, repository: Path, model: ModelState) -> float | None:
    """Ask `model` for an answer that was recorded when it was verified.

    Returns:
        The largest difference to it, of vectors at length 1; None where nothing was recorded.

    Raises:
        OSError: The server does not answer, or refuses.
        ValueError: It answers something else than the file promises.
    """
    path = repository / model.name / model.version / "golden.json"
    if not path.is_file():
        return None
    golden = json.loads(path.read_text(encoding="utf-8"))
    sample = golden["samples"][0]
    texts = {golden["input"]: sample["text"]} | ({"TEXT_PAIR": sample["pair"]} if "pair" in sample else {})
    body = {
        "inputs": [{"name": k, "shape": [1, 1], "datatype": "BYTES", "data": [text]} for k, text in texts.items()],
        "outputs": [{"name": golden["output"]}],
    }
    answer = _post(f"{url}/v2/models/{model.name}/versions/{model.version}/infer", body)
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


def _post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            return json.load(response)
    except urllib.error.HTTPError as exc:
        raise OSError(f"HTTP {exc.code}: {exc.read(500).decode(errors='replace')}") from exc


def _normalize(vector: list[float]) -> list[float]:
    length = math.sqrt(sum(value * value for value in vector)) or math.nan
    return [value / length for value in vector]
