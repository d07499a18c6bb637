"""Which models a tritonserver may have crashed of: those that it had just loaded."""

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass

from .published import Published

# A tritonserver that crashes so soon after it loaded a model may do so of that model.
_SOON_S = 5.0

# Within this time one crash is taken for the same as the one before.
_AGAIN_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Suspicion:
    """What a crash says of models.

    Attributes:
        names: Those that it may be the doing of, as far as they are to be taken out and loaded one after another.
        crashes: Of how many crashes the only one was loaded alone; 0 where it may be any of several.
        is_open: Whether it may be the doing of several, so that none is to be blamed.
    """

    names: tuple[str, ...] = ()
    crashes: int = 0
    is_open: bool = False


class Crashes:
    """Knows what each tritonserver has loaded, and since when: what has been loaded for long is above suspicion.

    Where several had just been loaded, they are loaded one after another when it happens again, each as long after the
    one before that a crash is the doing of that one.
    """

    def __init__(self) -> None:
        # Name → what the tritonserver has loaded, and since when.
        self._loaded: dict[str, tuple[Published, float]] = {}
        self._steady: dict[str, Published] = {}
        self._suspects: set[str] = set()
        # Name → what was loaded alone when tritonserver crashed, how often, and when it last was.
        self._alone: dict[str, tuple[Published, int, float]] = {}
        self._last_open = -math.inf

    def tell_loaded(self, several: Iterable[Published]) -> None:
        """Learn that tritonserver has loaded these."""
        now = time.monotonic()
        self._loaded |= {published.name: (published, now) for published in several}

    def tell_end(self, *, is_crash: bool, is_cut_off: bool) -> Suspicion:
        """Learn that tritonserver ended, and return what that says of the models that it had loaded.

        Args:
            is_crash: Whether it ended by itself.
            is_cut_off: Whether it was loading another meanwhile.
        """
        now = time.monotonic()
        self._clear(now)
        recent = {name: each for name, (each, _) in self._loaded.items() if not self.is_steady(each)}
        self._loaded.clear()
        if not is_crash or not recent:
            return Suspicion()
        if is_cut_off:
            # That is tried again only when these have been loaded for long.
            return Suspicion(is_open=True)
        names = tuple(sorted(recent))
        if len(names) == 1:
            self._suspects |= {*names}
            return Suspicion(names=names, crashes=self._count(recent[names[0]], now))
        is_again, self._last_open = now - self._last_open <= _AGAIN_S, now
        if is_again:
            self._suspects |= {*names}
        return Suspicion(names=names if is_again else (), is_open=True)

    def suspect(self, several: Iterable[Published]) -> None:
        """Have those of them that are not above suspicion loaded one after another."""
        self._suspects |= {published.name for published in several if not self.is_steady(published)}

    def is_steady(self, published: Published) -> bool:
        """Tell whether a tritonserver has had it loaded for long."""
        return self._steady.get(published.name) == published

    def find_pause(self, name: str) -> float:
        """Return until when a model is not to be loaded, as `time.monotonic` tells it; 0 where it may be now."""
        self._clear(time.monotonic())
        if name not in self._suspects:
            return 0.0
        return max((since + _SOON_S for each, since in self._loaded.values() if not self.is_steady(each)), default=0.0)

    def _clear(self, now: float) -> None:
        """Take what has been loaded for long for steady."""
        for name, (published, since) in self._loaded.items():
            if now - since > _SOON_S:
                self._steady[name] = published
                self._suspects.discard(name)

    def _count(self, published: Published, now: float) -> int:
        before, count, since = self._alone.get(published.name, (published, 0, now))
        count = count + 1 if before == published and now - since <= _AGAIN_S else 1
        self._alone[published.name] = published, count, now
        return count
