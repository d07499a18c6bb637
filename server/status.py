"""What the launcher itself has to tell: counters for Prometheus, and whether to send requests here at all."""

import json
import math
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from .following.follower import Following, State
from .following.waiting import Waiting, drop_told

_HELP = {
    "modelyard_ready": (
        "gauge",
        "1 while requests are welcome and some model answers, 0 while full, starting, healing or stopping.",
    ),
    "modelyard_lets_callers_in": (
        "gauge",
        "1 while tritonserver answers on a new connection, 0 while it accepts none.",
    ),
    "modelyard_models": ("gauge", "Models that clients should be able to ask."),
    "modelyard_models_served": ("gauge", "Models that clients can ask now."),
    "modelyard_backend_deaths_total": ("counter", "Backend processes that died or hung, by model."),
    "modelyard_model_revivals_total": ("counter", "Times a model was loaded anew after a death, by model."),
    "modelyard_model_given_up": ("gauge", "1 for a model that died too often and is unloaded for a while."),
    "modelyard_active_version": (
        "gauge",
        "Version that the repository says should be served, by model; 0 for none. With --follow off, as it said at the "
        "start.",
    ),
    "modelyard_served_version": ("gauge", "Version that is served, by model; 0 for none."),
    "modelyard_rollouts_total": ("counter", "Changes of what is served, by model and outcome."),
    "modelyard_tritonserver_restarts_total": ("counter", "Times tritonserver was started anew after it died or hung."),
}


@dataclass(frozen=True, kw_only=True)
class Lapse:
    """That something of a model does not answer.

    Attributes:
        reason: Why that stays so; empty where it is being brought back.
        answers: Whether others of it do.
        seen_at: When it was found, as `time.monotonic` tells it; infinity where it is so now.
    """

    reason: str
    answers: bool
    seen_at: float = math.inf


class Status:
    """Counters and the readiness, safe to use from several threads."""

    def __init__(self, *, follows: bool = True) -> None:
        self._lock = threading.Lock()
        self._follows = follows
        self._followed: dict[str, Following] = {}
        self._waiting: dict[str, Waiting] = {}
        self._lapses: Mapping[str, Lapse] = {}
        # When each model was loaded or changed last.
        self._rolled_at: dict[str, float] = {}
        self._is_welcoming = False
        self._refusal = ""
        self._values: dict[tuple[str, str], int] = {
            ("modelyard_ready", ""): 0,
            ("modelyard_lets_callers_in", ""): 1,
            ("modelyard_models", ""): 0,
            ("modelyard_models_served", ""): 0,
            ("modelyard_tritonserver_restarts_total", ""): 0,
        }

    def expect(self, models: Iterable[str]) -> None:
        """Begin to count for these models, from zero: what is not there yet cannot be seen to rise.

        What has been counted of one already stays.
        """
        with self._lock:
            for model in models:
                for reason in ("died", "hung"):
                    self._values.setdefault(("modelyard_backend_deaths_total", _label(model=model, reason=reason)), 0)
                self._values.setdefault(("modelyard_model_revivals_total", _label(model=model)), 0)
                self._values.setdefault(("modelyard_model_given_up", _label(model=model)), 0)

    @property
    def ready(self) -> bool:
        """Whether requests are welcome, and some model answers them."""
        with self._lock:
            return self._values["modelyard_ready", ""] == 1

    @ready.setter
    def ready(self, value: bool) -> None:
        with self._lock:
            self._is_welcoming = value
            self._update_ready()

    @property
    def is_welcoming(self) -> bool:
        """Whether requests are welcome, whatever answers them."""
        with self._lock:
            return self._is_welcoming

    @property
    def lets_callers_in(self) -> bool:
        """Whether who connects now is answered."""
        with self._lock:
            return not self._refusal

    def refuse_callers(self, reason: str) -> None:
        """Tell in words why a new connection is not answered; empty where it is."""
        with self._lock:
            self._refusal = reason
            self._values["modelyard_lets_callers_in", ""] = int(not reason)
            self._update_ready()

    def count_models(self, served: int, wanted: int) -> None:
        """Tell how many models clients can ask now, and how many they should be able to ask."""
        with self._lock:
            self._values["modelyard_models_served", ""] = served
            self._values["modelyard_models", ""] = wanted
            self._update_ready()

    def tell_lapses(self, lapses: Mapping[str, Lapse]) -> None:
        """Tell of which models something was lost: a backend process, or all of it."""
        with self._lock:
            self._lapses = lapses

    def tell_waiting(self, waiting: Mapping[str, Waiting]) -> None:
        """Tell which models have changed in the repository and are not followed yet."""
        with self._lock:
            self._waiting = {**waiting}

    def describe_readiness(self) -> str:
        """Return in words whether requests are welcome, and what for."""
        with self._lock:
            served, wanted = self._values["modelyard_models_served", ""], self._values["modelyard_models", ""]
            if not self._is_welcoming:
                return "not ready"
            if self._refusal:
                return f"not ready: {self._refusal}"
            if not served:
                return f"not ready: none of {wanted} models is served"
            return "ready" if served == wanted else f"ready, {served} of {wanted} models"

    def _update_ready(self) -> None:
        self._values["modelyard_ready", ""] = int(
            self._is_welcoming and not self._refusal and self._values["modelyard_models_served", ""] > 0
        )

    def count_death(self, model: str, reason: str) -> None:
        """Count a backend process of `model` that `reason` ("died" or "hung")."""
        self._add("modelyard_backend_deaths_total", _label(model=model, reason=reason))

    def count_revival(self, model: str) -> None:
        """Count a model brought back."""
        self._add("modelyard_model_revivals_total", _label(model=model))

    def mark_given_up(self, model: str, value: bool) -> None:
        """Tell whether `model` died too often, and nobody brings it back for a while."""
        with self._lock:
            self._values["modelyard_model_given_up", _label(model=model)] = int(value)

    def count_restart(self) -> None:
        """Count a tritonserver started anew."""
        self._add("modelyard_tritonserver_restarts_total", "")

    def follow(self, model: str, following: Following) -> None:
        """Tell how far `model` is followed; what is in order without a version of ours is forgotten."""
        with self._lock:
            self._waiting = drop_told(self._waiting, model, following.active)
            before = self._followed.pop(model, None)
            has_ended = before is not None and before.state == "rolling" and following.state != "rolling"
            # One that is tried again is told as failed until it is served.
            has_recovered = before is not None and before.state == "failed" and following.state == "served"
            if has_ended or has_recovered:
                self._rolled_at[model] = time.monotonic()
            active, served = (f"modelyard_{kind}_version" for kind in ("active", "served"))
            # One that could not be served, or waited, goes on being told of while it is tried.
            is_retried = before is not None and following.state == "rolling"
            is_told = following.state == "failed" or is_retried or bool(following.reason)
            if following.active or following.served or is_told:
                self._followed[model] = following
                self._values[active, _label(model=model)] = following.active
                self._values[served, _label(model=model)] = following.served
                for outcome in ("done", "failed"):
                    self._values.setdefault(("modelyard_rollouts_total", _label(model=model, outcome=outcome)), 0)
            else:
                for metric in (active, served):
                    self._values.pop((metric, _label(model=model)), None)
        # What the repository has in place of what is served may be known to fail before it is loaded.
        is_refused = following.state == "failed" and following.active != following.served
        is_new = before is not None and before.active != following.active
        is_done = has_recovered and before is not None and before.served != following.served
        if has_ended or is_done or (is_refused and is_new):
            outcome = "failed" if following.state == "failed" else "done"
            self._add("modelyard_rollouts_total", _label(model=model, outcome=outcome))

    def render_versions(self) -> str:
        """Return whether the repository is followed, and of every model how far: versions, state, reason; as JSON."""
        with self._lock:
            models = {name: _render_following(item) for name, item in sorted(self._tell_all().items())}
        return json.dumps({"follows": self._follows, "models": models}, indent=2) + "\n"

    def render(self) -> str:
        """Return everything in Prometheus' text format."""
        with self._lock:
            told = self._tell_all()
            active = {("modelyard_active_version", _label(model=name)): item.active for name, item in told.items()}
            served = {("modelyard_served_version", _label(model=name)): item.served for name, item in told.items()}
            values = sorted((self._values | active | served).items())
        lines: list[str] = []
        for name, (kind, text) in _HELP.items():
            lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
            lines += [f"{metric}{labels} {value}" for (metric, labels), value in values if metric == name]
        return "\n".join(lines) + "\n"

    def _tell_all(self) -> dict[str, Following]:
        """Return how far each model is followed, those that wait for it included."""
        told = {**self._followed}
        for name, item in self._waiting.items():
            # As in `follow`: what has no version of ours is told of where it is damaged.
            if name in told or item.active or item.is_damaged:
                served = told[name].served if name in told else 0
                state: State = "failed" if item.is_damaged else "rolling"
                told[name] = Following(active=item.active, served=served, state=state, reason=item.reason)
        return {name: self._tell(name, item) for name, item in told.items()}

    def _tell(self, name: str, item: Following) -> Following:
        """Return how far a model is followed, for its clients: it is served while it answers."""
        reason, answers = self._find_lapse(name) if self._is_welcoming else ("", False)
        served = item.served if answers else 0
        if item.state == "failed" and item.served and not served and self._is_welcoming:
            lost = reason or "its backend processes have ended"
            before = item.reason.rstrip(".").replace("is served as before", "was served before")
            return replace(item, served=0, reason=f"{before}; none is served now, for {lost}")
        if item.state != "served" or (answers and not reason):
            return replace(item, served=served)
        return replace(item, served=served, state="failed" if reason else "rolling", reason=reason)

    def _find_lapse(self, name: str) -> tuple[str, bool]:
        """Return why something of a model is lost for good, and whether it answers all the same."""
        lapse = self._lapses.get(name)
        # What was found of it before it was loaded says nothing of it.
        if not lapse or lapse.seen_at < self._rolled_at.get(name, 0.0):
            return "", True
        return lapse.reason, lapse.answers

    def _add(self, name: str, labels: str) -> None:
        with self._lock:
            self._values[name, labels] = self._values.get((name, labels), 0) + 1


def _render_following(item: Following) -> dict[str, str | int]:
    told = {"active": item.active, "served": item.served, "state": item.state, "reason": item.reason}
    return told | ({"golden": item.golden} if item.golden and item.state == "served" else {})


def _label(**labels: str) -> str:
    """Return labels as Prometheus' text format writes them: a backslash, a quote and the end of a line are escaped."""
    escaped = {
        name: value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for name, value in labels.items()
    }
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped.items()) + "}"
