"""What could not be served, why, and when it is tried again."""

import math
import shlex
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import GoneError, RolloutError, ShortageError
from .health import LostProcessError
from .model_text import CONFIG_FILE
from .published import Loaded, Published

# It is tried again after this long, and each time after twice as long.
FIRST_RETRY_S = 10.0
_LAST_RETRY_S = 600.0

# The same of one that loads well and whose process was ended while it was asked, by somebody else as a rule.
LOST_RETRY_S = 1.0

# One in whose loading tritonserver crashed so often is not tried again by itself: every try takes all models down. One
# crash may be another's doing.
_MAX_CRASHES = 2


@dataclass(kw_only=True)
class Failure:
    """A model that could not be served as the repository has it.

    Attributes:
        wanted: What was tried.
        reason: Why it failed, in one sentence, and what has become known since.
        retry_at: When it is tried again, as `time.monotonic` tells it.
        delay_s: How long it waits for that.
        is_cut_off: Whether tritonserver ended meanwhile, and nobody has said yet how.
        crashes: How often it crashed meanwhile.
        known: What was loaded of that version before, which it is held against; None where it is taken as it comes.
        is_overtaken: Whether the repository had something else when it failed.
        is_untried: Whether nothing is known of it but that it was among several of which one was not loaded.
        is_free: Whether to try it costs nothing, so that it is tried again soon, and said once.
    """

    wanted: Published
    reason: str
    retry_at: float
    delay_s: float
    is_cut_off: bool = False
    crashes: int = 0
    known: Loaded | None = None
    is_overtaken: bool = False
    is_untried: bool = False
    is_free: bool = False

    @property
    def promise(self) -> str:
        """When it is tried again, if it is, as a sentence."""
        if self.is_overtaken:
            return "It is no longer what the repository has."
        return f"Tried again in {self.delay_s:.0f} s, or once the repository changes."

    @property
    def is_deadly(self) -> bool:
        """Whether it is not tried again by itself."""
        return self.crashes >= _MAX_CRASHES


class Failures(dict[str, Failure]):
    """Name → the last failure of each model that could not be served.

    Args:
        repository: The model repository.
    """

    def __init__(self, repository: Path) -> None:
        super().__init__()
        self._repository = repository

    def doubt(self, published: Published, reason: str, delay_s: float, known: Loaded | None = None) -> None:
        """Take a model that was served for one that cannot be, and that is tried again after `delay_s`."""
        retry_at = time.monotonic() + delay_s
        failure = Failure(wanted=published, reason=reason, retry_at=retry_at, delay_s=FIRST_RETRY_S, known=known)
        self[published.name] = failure

    def note(self, wanted: Published, error: RolloutError, known: Loaded | None) -> tuple[Failure, bool]:
        """Return the failure of a try that led to nothing, and whether it is another than the one before."""
        failure = self.get(wanted.name)
        before = failure if failure and _came_of(failure, wanted) else None
        # To look at files or to count threads costs nothing, and of those the configuration alone is watched.
        is_free = bool(wanted.damage) or isinstance(error.__cause__, ShortageError)
        first = LOST_RETRY_S if isinstance(error.__cause__, LostProcessError) else FIRST_RETRY_S
        delay = min(2 * before.delay_s, _LAST_RETRY_S) if before and not is_free else first
        self[wanted.name] = Failure(
            wanted=wanted,
            reason=str(error),
            retry_at=time.monotonic() + delay,
            delay_s=delay,
            is_cut_off=isinstance(error.__cause__, GoneError),
            crashes=before.crashes if before else 0,
            known=known,
            is_free=is_free,
        )
        return self[wanted.name], not (before and before.is_free and is_free)

    def note_end(self, how: str, *, is_crash: bool) -> Iterator[Failure]:
        """Yield each that was cut off by the end of a tritonserver, with what that says of it.

        Args:
            how: How it ended, in words that follow its name.
            is_crash: Whether it ended by itself. Who killed it has nothing to say of the model, which is tried again.
        """
        for failure in self.values():
            if not failure.is_cut_off:
                continue
            failure.is_cut_off = False
            failure.crashes += is_crash
            failure.reason += f" Meanwhile tritonserver {how}."
            if failure.is_deadly:
                failure.retry_at = math.inf
                config = shlex.quote(str(self._repository / failure.wanted.name / CONFIG_FILE))
                failure.reason += (
                    f" Not tried again before a file of it changes (`touch {config}` will do) or another version is "
                    f"active: tritonserver crashed {failure.crashes} times as it was loaded."
                )
            yield failure

    def hurry(self, changed: Collection[str] = (), *, mended: Collection[str] = ()) -> None:
        """Have those tried again at once that have changed.

        Args:
            changed: Names of folders that are not as they were; they say nothing of what tritonserver did not survive.
            mended: Names of models of which a file is not.
        """
        for name, failure in self.items():
            is_changed = not {*changed}.isdisjoint({name, *failure.wanted.configs})
            if name in mended or (is_changed and not failure.is_deadly):
                failure.retry_at = 0.0

    def is_waiting(self, wanted: Published) -> bool:
        """Tell whether this very model has failed and is not to be tried again yet."""
        failure = self.get(wanted.name)
        return failure is not None and failure.wanted == wanted and failure.retry_at > time.monotonic()

    def find_turn(self, wanted: Published) -> float:
        """Return when it is a model's turn: what has failed as it stands comes after all that was not tried."""
        failure = self.get(wanted.name)
        return failure.retry_at if failure and _came_of(failure, wanted) else -math.inf

    def are_due(self) -> bool:
        """Tell whether one is to be tried again now."""
        return any(failure.retry_at <= time.monotonic() for failure in self.values())


def _came_of(failure: Failure, wanted: Published) -> bool:
    """Tell whether a failure is what came of trying a model as it stands."""
    return failure.wanted == wanted and not failure.is_untried
