"""What memory models take, as their processes show it: of a version that is not loaded yet nobody can ask one."""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ..tritonserver.backend_processes import list_running
from ..tritonserver.processes import count_own_bytes
from .published import Published
from .sums import list_files
from .wishes import count_instances


class Footprints:
    """What one process of each model of a tritonserver takes.

    Args:
        repository: Repository that the models are published in.
        find_pid: Returns the id of that tritonserver's process.
    """

    def __init__(self, repository: Path, find_pid: Callable[[], int]) -> None:
        self._repository = repository
        self._find_pid = find_pid
        # Triton model → bytes that one process of it had when it was loaded, before requests had it take more.
        self._at_load: dict[str, int] = {}

    def measure(self, models: Iterable[str]) -> None:
        """Learn what one process takes of each of these models, which have just been loaded."""
        for model in models:
            # Those of another version that are loaded beside it have had requests.
            if own := min(filter(None, self.list_left(model)), default=0):
                self._at_load[model] = own

    def list_left(self, model: str) -> list[int]:
        """Return the bytes that each living process of a model has of its own.

        Where they cannot be looked at now, they count as ended: less comes free of those.
        """
        with contextlib.suppress(OSError):
            return [count_own_bytes(process) for process in list_running(self._find_pid(), model)]
        return []

    def estimate(self, model: str, left: Sequence[int]) -> int:
        """Return the bytes that one process takes of a model that is loaded anew; 0 where nothing is known.

        Args:
            model: Its name.
            left: What its living processes have; those that ended are taken to have had as much.
        """
        return max(left, default=self._at_load.get(model, 0))

    def estimate_beside(self, old: Published, new: Published) -> int:
        """Return the bytes that all processes of a version take at least, by what those of the one before it had.

        They count in proportion where its files are smaller, as those of another precision are.
        """
        found = 0.0
        for name, config in new.configs.items():
            parts = [self._repository / name / str(each.version) for each in (old, new)]
            with contextlib.suppress(OSError):
                before, after = (sum(path.stat().st_size for path in list_files(part)) for part in parts)
                found += count_instances(config) * self._at_load.get(name, 0) * min(1.0, after / max(1, before))
        return int(found)
