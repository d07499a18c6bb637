"""What the launcher itself has to tell: counters for Prometheus, and whether to send requests here at all."""

import threading

_HELP = {
    "modelyard_ready": ("gauge", "1 while requests are welcome, 0 while starting, healing tritonserver or stopping."),
    "modelyard_backend_deaths_total": ("counter", "Backend processes that died or hung, by model."),
    "modelyard_model_revivals_total": ("counter", "Times a model was loaded anew after a death, by model."),
    "modelyard_model_given_up": ("gauge", "1 for a model that died too often and was unloaded."),
    "modelyard_tritonserver_restarts_total": ("counter", "Times tritonserver was started anew after it died or hung."),
}


class Status:
    """Counters and the readiness, safe to use from several threads."""

    def __init__(self, models: list[str]) -> None:
        self._lock = threading.Lock()
        self._values: dict[tuple[str, str], int] = {
            ("modelyard_ready", ""): 0,
            ("modelyard_tritonserver_restarts_total", ""): 0,
        }
        for model in models:
            for reason in ("died", "hung"):
                self._values["modelyard_backend_deaths_total", _label(model=model, reason=reason)] = 0
            self._values["modelyard_model_revivals_total", _label(model=model)] = 0
            self._values["modelyard_model_given_up", _label(model=model)] = 0

    @property
    def ready(self) -> bool:
        """Whether requests are welcome."""
        with self._lock:
            return self._values["modelyard_ready", ""] == 1

    @ready.setter
    def ready(self, value: bool) -> None:
        with self._lock:
            self._values["modelyard_ready", ""] = int(value)

    def count_death(self, model: str, reason: str) -> None:
        """Count a backend process of `model` that `reason` ("died" or "hung")."""
        self._add("modelyard_backend_deaths_total", _label(model=model, reason=reason))

    def count_revival(self, model: str) -> None:
        """Count a model brought back."""
        self._add("modelyard_model_revivals_total", _label(model=model))

    def mark_given_up(self, model: str, value: bool) -> None:
        """Tell whether nobody tries to bring `model` back any more."""
        with self._lock:
            self._values["modelyard_model_given_up", _label(model=model)] = int(value)

    def count_restart(self) -> None:
        """Count a tritonserver started anew."""
        self._add("modelyard_tritonserver_restarts_total", "")

    def render(self) -> str:
        """Return everything in Prometheus' text format."""
        with self._lock:
            values = sorted(self._values.items())
        lines: list[str] = []
        for name, (kind, text) in _HELP.items():
            lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
            lines += [f"{metric}{labels} {value}" for (metric, labels), value in values if metric == name]
        return "\n".join(lines) + "\n"

    def _add(self, name: str, labels: str) -> None:
        with self._lock:
            self._values[name, labels] = self._values.get((name, labels), 0) + 1


def _label(**labels: str) -> str:
    """Return labels as Prometheus' text format writes them: a backslash, a quote and the end of a line are escaped."""
    escaped = {
        name: value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for name, value in labels.items()
    }
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped.items()) + "}"
