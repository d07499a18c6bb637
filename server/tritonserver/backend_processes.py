"""The processes in which models run, for whoever waits for an answer of one."""

import contextlib
import time
from collections.abc import Collection
from pathlib import Path

from .processes import list_children, read_arguments, read_stat

STUB = "triton_python_backend_stub"

# So long tritonserver may take to say itself that a process has ended, which it does of some models and not of others.
_LAST_WORD_S = 1.5


def read_model_folder(pid: int) -> Path | None:
    """Return the folder of the version of a model that process `pid` runs; None if it runs none, or has ended.

    Raises:
        OSError: This process has no descriptor or memory left to look with.
    """
    arguments = read_arguments(pid)
    # <repository>/<model>/<version>/<file> is the first argument of a stub (src/stub_launcher.cc).
    return Path(arguments[1]).parent if len(arguments) > 1 and arguments[0].endswith(STUB) else None


def list_running(pid: int, model: str, version: int = 0) -> list[int]:
    """Return the ids of tritonserver's processes that run a version of a model.

    Args:
        pid: Id of tritonserver's process.
        model: Name of the model.
        version: That version; 0 for any.

    Raises:
        OSError: This process has no descriptor or memory left to look with.
    """
    # One that has ended has no command line any more.
    found = ((child, read_model_folder(child)) for child in list_children(pid))
    of_model = ((child, folder.name) for child, folder in found if folder is not None and folder.parent.name == model)
    return [child for child, name in of_model if version == 0 or name == str(version)]


class EndWatch:
    """Whether a process ends that a question has gone to.

    tritonserver 2.51 answers at once for such a process; but where the model is decoupled, whoever has asked waits for
    ever, unless the model is loaded anew.

    Args:
        pid: Id of tritonserver's process.
        models: Names of the models that the question goes through.
        version: Of them.
    """

    def __init__(self, pid: int, models: Collection[str], version: int) -> None:
        # Id → when it started.
        self._asked: dict[int, int] = {}
        self._ended_at: float | None = None
        self.end = ""
        # That we cannot look is not that one has ended.
        with contextlib.suppress(OSError, MemoryError):
            for child in list_children(pid):
                folder, stat = read_model_folder(child), read_stat(child)
                if folder and stat and folder.parent.name in models and folder.name == str(version):
                    self._asked[child] = stat.started

    def has_ended(self) -> bool:
        """Look once; return whether one has, and tritonserver has had time to say so."""
        self.look()
        return self._ended_at is not None and time.monotonic() >= self._ended_at + _LAST_WORD_S

    def look(self) -> bool:
        """Look once; return whether one has ended."""
        with contextlib.suppress(OSError, MemoryError):
            for pid, started in self._asked.items() if self._ended_at is None else ():
                stat = read_stat(pid)
                if stat is None or stat.started != started or stat.has_ended:
                    how = stat.describe_end() if stat and stat.started == started else "is no more"
                    self._ended_at, self.end = time.monotonic(), f"process {pid} {how} while it was asked"
                    break
        return self._ended_at is not None
