"""Orders to a running tritonserver, and what it says of its models.

An order to load goes over gRPC, where a thread of its own carries it out. Over HTTP it would be one of eight threads,
and all other connections of that thread would wait for as long as a model takes to load.
"""

import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from modelyard.exchange import fetch

from ..errors import ControlError, GoneError, StrangerError
from .control_key import ControlKey

# A large model from a cold disk may take minutes; what does nothing meanwhile is given up sooner.
_LOAD_TIMEOUT_S = 3600.0
_TIMEOUT_S = 5.0

_Picked = TypeVar("_Picked")

_LOAD = "/inference.GRPCInferenceService/RepositoryModelLoad"

# Asked in passing, between two looks at the processes.
_GLANCE_TIMEOUT_S = 0.5


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


class Control:
    """The control endpoints of one tritonserver.

    Args:
        url: URL of its HTTP port.
        key: Key that opens them.
        grpc_address: Host and port of gRPC; None where that is encrypted.
    """

    def __init__(self, url: str, key: ControlKey, grpc_address: tuple[str, int] | None) -> None:
        self.url = url
        self._key = key
        self._grpc_address = grpc_address

    def read_version(self) -> str:
        """Return the version of tritonserver itself, such as 2.51.0.

        Raises:
            StrangerError: Another program answers.
            ControlError: It does not answer.
        """
        return self._read("/v2", lambda answer: str(answer["version"]))

    def read_states(self) -> list[ModelState]:
        """Return the state of every model that was asked for.

        Raises:
            ControlError: It does not answer, or refuses.
        """
        return self._read("/v2/repository/index", lambda answer: [_read_state(entry) for entry in answer], {})

    def load(self, model: str, gives_up: Callable[[], bool] = lambda: False) -> None:
        """Load `model` as its configuration says now; what was loaded of it before answers until then.

        Args:
            model: Its name.
            gives_up: Asked once a second whether there is nothing to wait for; not where gRPC is encrypted.

        Raises:
            ControlError: It cannot be loaded; what was loaded before stays.
        """
        path = f"/v2/repository/models/{urllib.parse.quote(model)}/load"
        if not self._grpc_address:
            self._ask(path, {}, timeout_s=_LOAD_TIMEOUT_S)
            return
        # Here and not above: what refuses to start, and says what is missing, runs where no package is installed.
        from .grpc_call import GrpcError, call

        begun = time.monotonic()
        try:
            headers = self._key.grpc_headers
            call(self._grpc_address, _LOAD, _name_model(model), headers, _LOAD_TIMEOUT_S, gives_up=gives_up)
        except TimeoutError as exc:
            raise ControlError(
                path,
                expected="an answer, or a process that computes or reads",
                got=f"neither, {time.monotonic() - begun:.0f} s after the order",
            ) from exc
        except GrpcError as exc:
            raise ControlError(path, expected="an answer", got=str(exc)) from exc
        except OSError as exc:
            raise _lose(path, exc, _LOAD_TIMEOUT_S) from exc

    def unload(self, model: str) -> None:
        """Stop serving `model`, so that it no longer counts as ready.

        Raises:
            ControlError: It does not answer, or refuses.
        """
        self._ask(f"/v2/repository/models/{urllib.parse.quote(model)}/unload", {})

    def count_answers(self, model: str) -> int:
        """Return how many requests `model` answered since it was last loaded.

        Raises:
            ControlError: It does not answer, or refuses.
        """

        def count(answer: Any) -> int:
            return sum(int(entry["inference_stats"]["success"]["count"]) for entry in answer["model_stats"])

        return self._read(f"{_path(model)}/stats", count)

    def count_instances(self, model: str) -> int:
        """Return how many instances of `model` should run: of every version that is ready, those of its config.

        Raises:
            ControlError: It does not answer, or refuses.
        """
        versions = sum(state.name == model and state.ready for state in self.read_states())
        if not versions:
            return 0

        def count(answer: Any) -> int:
            return sum(int(group["count"]) * max(1, len(group["gpus"])) for group in answer["instance_group"])

        return versions * self._read(f"{_path(model)}/config", count)

    def read_parameters(self, model: str) -> dict[str, str]:
        """Return the parameters of the configuration that `model` was loaded with.

        Raises:
            ControlError: It does not answer, or refuses.
        """

        def pick(answer: Any) -> dict[str, str]:
            return {name: str(value["string_value"]) for name, value in answer.get("parameters", {}).items()}

        return self._read(f"{_path(model)}/config", pick, timeout_s=_GLANCE_TIMEOUT_S)

    def is_ensemble(self, model: str) -> bool:
        """Tell whether `model` is an ensemble, which runs in no process of its own.

        Raises:
            ControlError: It does not answer, or refuses.
        """
        return self._read(_path(model), lambda answer: bool(answer["platform"] == "ensemble"))

    def _read(
        self,
        path: str,
        pick: Callable[[Any], _Picked],
        body: dict[str, Any] | None = None,
        timeout_s: float = _TIMEOUT_S,
    ) -> _Picked:
        """Return what `pick` takes from an answer in JSON."""
        return pick_from(self._ask(path, body, timeout_s), pick, f"{self.url}{path}", "stop it or pass another port")

    def _ask(self, path: str, body: dict[str, Any] | None = None, timeout_s: float = _TIMEOUT_S) -> bytes:
        request = urllib.request.Request(
            f"{self.url}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json", **self._key.headers},
        )
        try:
            return fetch(request, timeout_s)
        except urllib.error.HTTPError as exc:
            reason = exc.read().decode(errors="replace")
            raise ControlError(path, expected="an answer", got=f"HTTP {exc.code}: {reason}") from exc
        except (OSError, http.client.HTTPException) as exc:
            raise _lose(path, exc, timeout_s) from exc


def pick_from(answer: bytes, pick: Callable[[Any], _Picked], url: str, remedy: str) -> _Picked:
    """Return what `pick` takes from an answer in JSON; of what tritonserver never says, nothing can be taken.

    Raises:
        StrangerError: It cannot, and `remedy` is what to do about it.
    """
    try:
        return pick(json.loads(answer))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as exc:
        told = f"'{answer[:100].decode(errors='replace')}'" if answer else "nothing"
        raise StrangerError(
            f"another program answers on {url}", expected="tritonserver", got=told, remedy=remedy
        ) from exc


def _read_state(entry: Any) -> ModelState:
    return ModelState(
        name=entry["name"],
        version=entry.get("version", ""),
        state=entry.get("state", "NOT LOADED"),
        reason=entry.get("reason", ""),
    )


def _lose(path: str, exc: Exception, timeout_s: float) -> ControlError:
    """Return the error for an order without an answer."""
    # urllib wraps what it met.
    cause = getattr(exc, "reason", exc)
    if isinstance(cause, ConnectionError):
        return GoneError(path, expected="an answer", got=f"the end of tritonserver ('{cause}')")
    return ControlError(path, expected=f"an answer within {timeout_s:g} s", got=f"'{exc}'")


def _path(model: str) -> str:
    return f"/v2/models/{urllib.parse.quote(model)}"


def _name_model(model: str) -> bytes:
    """Return a RepositoryModelLoadRequest, whose second field is the name; that of a folder has at most 255 bytes."""
    name = model.encode()
    size = bytes([len(name)]) if len(name) < 128 else bytes([len(name) % 128 + 128, len(name) // 128])
    return b"\x12" + size + name
