"""What the export is doing, reported on stderr while it does it."""

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console

# Called with what is being done inside a step, such as the case that is being verified.
Detail = Callable[[str], None]


class Progress:
    """Numbered steps with their times. A spinner on a terminal, plain lines elsewhere.

    Attributes:
        begun: How many steps have begun.
        expected: How many there will be, as far as is known.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self.expected = 0
        self.begun = 0

    def expect(self, steps: int) -> None:
        """Count on that many steps more. Whoever takes steps says so before the first of them."""
        self.expected += steps

    @contextlib.contextmanager
    def step(self, what: str) -> Iterator[Detail]:
        """Show that `what` is going on until the block ends, then how long it took."""
        self.begun += 1
        assert self.begun <= self.expected, f"Bug: nobody expected {what}"
        label = f"[{self.begun}/{self.expected}] {what}"
        start = time.monotonic()
        if not self._console.is_terminal:
            self._say(label)
        with self._console.status(label) as status:
            yield lambda detail: status.update(f"{label}: {detail}")
        taken = f"{time.monotonic() - start:.1f} s"
        # Elsewhere than on a terminal the label stands there already.
        self._say(f"{label}: {taken}" if self._console.is_terminal else f"      {taken}")

    def _say(self, line: str) -> None:
        # Labels have brackets of their own, which must not be read as styles.
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
