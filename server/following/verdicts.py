"""What is said of every model when a tritonserver has started: that it answers, or why it does not."""

from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import fit
from ..tritonserver.control import Control, ModelState
from ..tritonserver.settings import Settings
from .health import JUDGING_PATIENCE_S, check_answer

FAILED = "FAILED: "


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is said of one version of a model.

    Attributes:
        model: Name of the model.
        version: Number of the version; empty where none could be loaded.
        answers: Whether it answers.
        text: The same in words, with the reason where it does not.
    """

    model: str
    version: str
    answers: bool
    text: str


def judge_models(settings: Settings, control: Control, models: list[str]) -> list[Verdict]:
    """Ask every model for the answer that was recorded when it was verified.

    Args:
        settings: Where the server listens, and the repository with the recorded answers.
        control: Control endpoints of the tritonserver that has started.
        models: Names of the models that it was told to load.

    Raises:
        ControlError: It does not say what it has loaded.
    """
    states = [state for state in control.read_states() if state.state != "NOT LOADED"]
    # Of a version that could not be loaded the server gives the reason; of an ensemble over it nothing at all.
    states += [
        ModelState(
            name=name, version="", state="NOT LOADED", reason="its configuration or a step failed; the log says why"
        )
        for name in models
        if name not in {state.name for state in states}
    ]
    return [_judge(settings, state) for state in states if state.name in models and state.state]


def render_verdicts(verdicts: Iterable[Verdict]) -> list[str]:
    """Return a line for each, in columns."""
    verdicts = list(verdicts)
    width = max((len(verdict.model) for verdict in verdicts), default=0)
    return [
        f"  {verdict.model:<{width}}  {'version ' + verdict.version if verdict.version else '-':<11}  {verdict.text}"
        for verdict in verdicts
    ]


def _judge(settings: Settings, state: ModelState) -> Verdict:
    answers, text = _ask(settings, state)
    return Verdict(model=state.name, version=state.version, answers=answers, text=text)


def _ask(settings: Settings, state: ModelState) -> tuple[bool, str]:
    if not state.ready:
        return False, f"{FAILED}{fit(state.reason or state.state)}"
    try:
        error = check_answer(
            settings.endpoints.http_url,
            settings.repository,
            state.name,
            state.version,
            patience_s=JUDGING_PATIENCE_S,
        )
    except (OSError, ValueError, KeyError) as exc:
        return False, f"{FAILED}{exc}"
    return True, "ready" if error is None else f"ready, answers as verified within {error:.1e}"
