"""The way back from a change of the repository that fails, made of steps that need no room on the disk."""

from collections.abc import Callable


class Undo:
    """What takes changes back, the newest first.

    Every state between two changes can be served, and is one that being killed there would leave. So the way back
    stops at a step that fails: whatever lies below is what that state stands on, such as the version that a
    configuration still names. What is of no use in any state is litter, and goes whether the change succeeds or not;
    where the way back stops it stays, for its name tells the next change what else there is to remove.

    Attributes:
        left: What stopped a removal at the end of a change that succeeded, the first such thing; None where all went.
    """

    def __init__(self) -> None:
        self._steps: list[tuple[bool, Callable[[], object]]] = []
        self._last: list[Callable[[], object]] = []
        self.left: BaseException | None = None

    def add(self, step: Callable[[], object]) -> None:
        """Have `step` take back what is about to be changed; harmless where that was not changed after all."""
        self._steps.append((False, step))

    def add_litter(self, remove: Callable[[], object]) -> None:
        """Have `remove` called at the end, whatever that is; what it cannot remove is left to the next publication."""
        self._steps.append((True, remove))

    def add_last(self, step: Callable[[], object]) -> None:
        """Have `step` called where the change succeeds, when it is whole."""
        self._last.append(step)

    def run(self) -> OSError | None:
        """Go back and remove all litter, as far as it is possible, and return what stopped the way back."""
        while self._steps:
            is_litter, step = self._steps.pop()
            try:
                step()
            except OSError as exc:
                if not is_litter:
                    return exc
        return None

    def keep(self) -> None:
        """Keep the changes, and remove the litter."""
        litter = [step for is_litter, step in reversed(self._steps) if is_litter]
        for step in (*litter, *self._last):
            # All is done: an interruption comes too late now to end with "nothing was done".
            try:
                step()
            except (OSError, KeyboardInterrupt) as exc:
                self.left = self.left or exc
