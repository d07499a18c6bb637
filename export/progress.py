"""What the export is doing, reported on stderr while it does it."""

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console

# Called with what is being done inside a step, such as the case that is being verified.
Detail = Callable[[str], None]


class Progress:
    """Numbered steps with their times. A spinner on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._step = 0

    @contextlib.contextmanager
    def step(self, what: str) -> Iterator[Detail]:
        """Show that `what` is going on until the block ends, then how long it took."""
        self._step += 1
        label = f"[{self._step}/{self._steps}] {what}"
        start = time.monotonic()
        if not self._console.is_terminal:
            self._say(label)
        with self._console.status(label) as status:
            yield lambda detail: status.update(f"{label}: {detail}")
        self._say(f"{label}: {time.monotonic() - start:.1f} s")

    def _say(self, line: str) -> None:
        # Labels have brackets of their own, which must not be read as styles.
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
