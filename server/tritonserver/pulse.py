"""Signs of life of a tritonserver, asked for on a connection that stays open, and whether it lets anybody new in.

A server that cannot accept one connection more may still answer on those that it has: it lives, and a new caller waits
in vain. So both are asked. A question that cannot be asked, for want of a descriptor or of memory, says nothing.
"""

import contextlib
import enum
import http.client
import threading
import time
import urllib.parse

from modelyard.exchange import limit

from ..shortage import is_shortage

# As it starts, it answers whoever asks before anybody knows that it does.
_START_INTERVAL_S = 0.01
_INTERVAL_S = 0.5
_TIMEOUT_S = 1.0

# It is asked on a new connection this often. One of its threads reads that, and may be busy: only several questions in
# a row without an answer tell that nobody is let in.
_NEW_INTERVAL_S = 2.0
_MAX_UNANSWERED = 2

# tritonserver 2.51 opens its ports once it can serve, or for good without what serves where a cache cannot be made.
_MAX_DENIALS = 200


class Answer(enum.Enum):
    """The outcome of one question."""

    ALIVE = enum.auto()
    NOT_ALIVE = enum.auto()
    SILENT = enum.auto()
    HUNG_UP = enum.auto()
    NOT_ASKED = enum.auto()


class Probe:
    """Asks the server at `url` whether it is alive, over a connection that it keeps."""

    def __init__(self, url: str) -> None:
        parts = urllib.parse.urlsplit(url)
        self._address = (parts.hostname or "", parts.port or 0)
        self._connection: http.client.HTTPConnection | None = None

    def ask(self) -> Answer:
        """Return whether it is alive."""
        if self._connection is not None:
            if self._ask(self._connection) is Answer.ALIVE:
                return Answer.ALIVE
            # One thread of the server reads this connection, and may be the only one that is at work.
            self._connection.close()
            self._connection = None
        connection = http.client.HTTPConnection(*self._address, timeout=_TIMEOUT_S)
        answer = self._ask(connection)
        if answer is Answer.ALIVE:
            self._connection = connection
        else:
            connection.close()
        return answer

    def ask_anew(self) -> Answer:
        """Return whether it answers on a new connection. Its being made says nothing: that is the kernel's work."""
        with contextlib.closing(http.client.HTTPConnection(*self._address, timeout=_TIMEOUT_S)) as connection:
            return self._ask(connection)

    def close(self) -> None:
        """Leave no connection behind."""
        if self._connection is not None:
            self._connection.close()

    def _ask(self, connection: http.client.HTTPConnection) -> Answer:
        try:
            limit(connection, _TIMEOUT_S)
            connection.request("GET", "/v2/health/live")
            response = connection.getresponse()
            response.read()
        except ConnectionError:
            return Answer.HUNG_UP
        except (OSError, http.client.HTTPException, MemoryError) as exc:
            return Answer.NOT_ASKED if is_shortage(exc) else Answer.SILENT
        # Somebody else at its port may answer anything.
        return {200: Answer.ALIVE, 400: Answer.NOT_ALIVE}.get(response.status, Answer.SILENT)


class Pulse:
    """Asks again and again, on a thread of its own: a hung server would hold up the asker.

    Args:
        url: URL of the HTTP port of a server that is starting.

    Raises:
        RuntimeError: No thread can be started.
    """

    def __init__(self, url: str) -> None:
        self._probe = Probe(url)
        self._ended = threading.Event()
        self._answered = threading.Event()
        self._silent_for_s = 0.0
        self._asked_at: float | None = None
        self._unanswered = 0
        self._denials = 0
        self._hangs_up = False
        self._next_anew = 0.0
        threading.Thread(target=self._ask_again_and_again, daemon=True).start()

    def end(self) -> None:
        """Ask no more."""
        self._ended.set()

    @property
    def has_answered(self) -> bool:
        """Whether it has been alive."""
        return self._answered.is_set()

    @property
    def is_denied(self) -> bool:
        """Whether it answers as it starts, and again and again that it is not alive."""
        return self._denials >= _MAX_DENIALS

    def wait_for_answer(self, timeout_s: float) -> None:
        """Wait until it has been alive, for so long at most."""
        self._answered.wait(timeout_s)

    @property
    def silent_for_s(self) -> float:
        """How long it has been asked without an answer, since its first one.

        Only the time in which it was asked counts, so neither a launcher that was stopped nor a machine that slept
        takes its own absence for the server's.
        """
        asked_at = self._asked_at
        return self._silent_for_s + (0.0 if asked_at is None else _count(asked_at))

    @property
    def owes_answer(self) -> bool:
        """Whether it has been asked and has not answered yet."""
        return self._asked_at is not None or self._silent_for_s > 0

    @property
    def lets_callers_in(self) -> bool:
        """Whether it answers who connects now."""
        return self._unanswered <= _MAX_UNANSWERED

    @property
    def hangs_up(self) -> bool:
        """Whether it hung up on who connected last."""
        return self._hangs_up

    def hurry(self) -> None:
        """Ask on a new connection with the next question."""
        self._next_anew = 0.0

    def _ask_again_and_again(self) -> None:
        while not self._ended.wait(_START_INTERVAL_S) and (answer := self._probe.ask()) is not Answer.ALIVE:
            self._denials = self._denials + 1 if answer is Answer.NOT_ALIVE else 0
        if not self._ended.is_set():
            self._answered.set()
        while not self._ended.wait(_INTERVAL_S):
            asked_at = self._asked_at = time.monotonic()
            answer = self._probe.ask()
            self._hangs_up = answer is Answer.HUNG_UP
            if answer in (Answer.NOT_ALIVE, Answer.SILENT, Answer.HUNG_UP):
                self._silent_for_s += _count(asked_at) + _INTERVAL_S
            elif answer is Answer.ALIVE:
                self._silent_for_s = 0.0
            self._asked_at = None
            if answer is Answer.ALIVE and time.monotonic() >= self._next_anew:
                self._ask_anew()
        self._probe.close()

    def _ask_anew(self) -> None:
        answer = self._probe.ask_anew()
        if answer is not Answer.NOT_ASKED:
            self._unanswered = 0 if answer is Answer.ALIVE else self._unanswered + 1
            self._hangs_up = answer is Answer.HUNG_UP
        self._next_anew = time.monotonic() + _NEW_INTERVAL_S


def _count(asked_at: float) -> float:
    """Return how long ago that was, at most what a question can take: on the connection kept and on a new one."""
    return min(time.monotonic() - asked_at, 2 * _TIMEOUT_S)
