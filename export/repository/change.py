"""A change of the repository: alone, whole, and taken back where it fails."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from ..errors import ExportError, RepositoryError
from ..file_limit import advise, is_full
from .contents import find_active_version
from .files import make_folder
from .lock import PATIENCE_S, hold
from .undo import Undo


@contextlib.contextmanager
def change(repository: Path, name: str, doing: str, *, patience_s: float = PATIENCE_S) -> Iterator[Undo]:
    """Hold the repository while the block changes a model in it; what it did is undone where it fails.

    Args:
        repository: The repository, which is made if it is not there.
        name: The public model.
        doing: What is being done, such as `published in`.
        patience_s: How long another change is waited for.

    Raises:
        RepositoryError: The disk is full or fails, perhaps even to undo what was begun, or another change is at work.
    """
    undo = Undo()
    with contextlib.ExitStack() as held:
        try:
            make_folder(repository, undo)
            held.enter_context(hold(repository, patience_s))
            yield undo
        except BaseException as exc:
            stopped = undo.run()
            if stopped or isinstance(exc, OSError):
                raise _explain(exc, stopped, repository, name, doing) from exc
            raise
        undo.keep()


def _explain(exc: BaseException, stopped: OSError | None, repository: Path, name: str, doing: str) -> RepositoryError:
    """Return the one sentence on what went wrong, and on where the repository stands if it is not as it was."""
    what = f"{name} cannot be {doing} {repository}"
    got = (exc.strerror if isinstance(exc, OSError) else None) or str(exc) or type(exc).__name__
    if isinstance(exc, OSError) and exc.filename:
        got += f" for {exc.filename}"
    if stopped is None:
        usual = "free the disk" if is_full(exc) else "free the disk or correct the permissions"
        expected, remedy = advise(exc) or ("", usual)
        return RepositoryError(what, expected=expected, got=got, remedy=f"{remedy}, then do it again")
    served = "it is not known which version is active"
    with contextlib.suppress(ExportError, OSError):
        active = find_active_version(repository, name)
        served = f"version {active} is active" if active else "no version is active"
    return RepositoryError(
        f"{what}, and what was begun cannot be undone",
        got=f"{got}, then {stopped.strerror or stopped}",
        remedy=f"{served}; mend the disk and do it again, which clears up",
    )
