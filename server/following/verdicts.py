"""What is said of every model when a tritonserver has started: that it answers, or why it does not."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from ..errors import fit
from ..tritonserver.backend_processes import EndWatch
from ..tritonserver.control import Control, ModelState
from ..tritonserver.settings import Settings
from .health import JUDGING_PATIENCE_S, LostProcessError, check_answer
from .published import Published

FAILED = "FAILED: "


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is said of one version of a model.

    Attributes:
        model: Name of the model.
        version: Number of the version; empty where none could be loaded.
        answers: Whether it answers.
        was_lost: Whether it does not because a process of it was ended as it was asked, so that it may the next time.
        text: The same in words, with the reason where it does not.
    """

    model: str
    version: str
    answers: bool
    was_lost: bool = False
    text: str


def judge_models(settings: Settings, control: Control, published: Iterable[Published], pid: int) -> list[Verdict]:
    """Ask every model for the answer that was recorded when it was verified.

    Args:
        settings: Where the server listens, and the repository with the recorded answers.
        control: Control endpoints of the tritonserver that has started.
        published: The models that it was told to load.
        pid: Id of its process.

    Raises:
        ControlError: It does not say what it has loaded.
    """
    parts = {name: [*each.configs] for each in published for name in each.configs}
    states = [state for state in control.read_states() if state.state != "NOT LOADED"]
    # Of a version that could not be loaded the server gives the reason; of an ensemble over it nothing at all.
    states += [
        ModelState(
            name=name, version="", state="NOT LOADED", reason="its configuration or a step failed; the log says why"
        )
        for name in parts
        if name not in {state.name for state in states}
    ]
    return [_judge(settings, state, parts[state.name], pid) for state in states if state.name in parts and state.state]


def render_verdicts(verdicts: Iterable[Verdict]) -> list[str]:
    """Return a line for each, in columns."""
    verdicts = list(verdicts)
    width = max((len(verdict.model) for verdict in verdicts), default=0)
    return [
        f"  {verdict.model:<{width}}  {'version ' + verdict.version if verdict.version else '-':<11}  {verdict.text}"
        for verdict in verdicts
    ]


def _judge(settings: Settings, state: ModelState, parts: list[str], pid: int) -> Verdict:
    verdict = partial(Verdict, model=state.name, version=state.version)
    if not state.ready:
        return verdict(answers=False, text=f"{FAILED}{fit(state.reason or state.state)}")
    try:
        error = check_answer(
            settings.endpoints.http_url,
            settings.repository,
            state.name,
            state.version,
            patience_s=JUDGING_PATIENCE_S,
            watch=EndWatch(pid, parts, int(state.version)),
        )
    except (OSError, ValueError, KeyError) as exc:
        return verdict(answers=False, was_lost=isinstance(exc, LostProcessError), text=f"{FAILED}{exc}")
    text = "ready" if error is None else f"ready, answers as verified within {error:.1e}"
    return verdict(answers=True, text=text)
