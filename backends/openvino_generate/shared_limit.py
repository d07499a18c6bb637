"""What the versions of one model take of its memory for keys and values together.

During a rollout two versions are loaded, each with an engine in a process of its own. An engine gives nothing back
before it ends, so none may take all: it leaves an eighth to the version that comes after it. And while there is another
one, each lets in only what has room beside it, however long its answers grow.
"""

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

# Where tritonserver and the processes of its backends share memory too: a machine without it runs neither.
_PARENT = Path("/dev/shm")

_SPARED = 8

# So many blocks hold what a version is asked before it is let in: a recorded prompt and its text, and the engine's own.
LEAST_BLOCKS = 4

_CLAIM_BYTES = 8


def spare(blocks: int) -> int:
    """Return how many of so many blocks a version leaves to the one that comes after it."""
    return max(LEAST_BLOCKS, blocks // _SPARED)


class SharedLimit:
    """The claim of one version on a memory that others have a claim on too.

    A claim is a file that its owner holds locked, so that nothing is left of it when the process is killed. The folder
    is locked while claims are compared.

    Args:
        model: The folder in which the versions lie, the same for all that share.
        total: Bytes that there are for all.
        parent: Where the claims are.

    Raises:
        OSError: There is no room for the file.
        PermissionError: The folder is a link, or another user's.
    """

    def __init__(self, model: Path, total: int, parent: Path = _PARENT) -> None:
        self._total = total
        self._claim = 0
        folder = parent / f"modelyard-kv-{os.geteuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
            raise PermissionError(
                f"versions cannot share their memory in {folder}: expected a folder of this user's own, got a link or "
                "another user's; remove it"
            )
        self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        # Versions of one model are children of one tritonserver.
        self._shared = f"{os.getppid()}-{hashlib.sha256(os.fsencode(model)).hexdigest()[:16]}-"
        self._name = f"{self._shared}{os.getpid()}"
        with self._locked():
            self._file = os.open(self._name, os.O_RDWR | os.O_CREAT, 0o600, dir_fd=self._folder)
            fcntl.flock(self._file, fcntl.LOCK_EX)
            self._write(0)
            # Nobody else removes what killed processes left behind.
            list(self._read_others())

    def claim(self, wanted: int) -> bool:
        """Have the claim be `wanted` bytes from now on, if it shrinks or there is room; tell whether it is."""
        with self._locked():
            if wanted > self._claim and wanted + sum(self._read_others()) > self._total:
                return False
            self._write(wanted)
        return True

    def close(self) -> None:
        """Give up the claim."""
        with self._locked():
            os.unlink(self._name, dir_fd=self._folder)
        os.close(self._file)
        os.close(self._folder)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._folder, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._folder, fcntl.LOCK_UN)

    def _write(self, claim: int) -> None:
        os.pwrite(self._file, claim.to_bytes(_CLAIM_BYTES, "little"), 0)
        self._claim = claim

    def _read_others(self) -> Iterator[int]:
        """Yield the claims of the other versions; those of processes that have ended are removed."""
        for name in os.listdir(self._folder):  # noqa: PTH208
            if name == self._name:
                continue
            file = os.open(name, os.O_RDONLY, dir_fd=self._folder)
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                os.unlink(name, dir_fd=self._folder)
            except BlockingIOError:
                if name.startswith(self._shared):
                    yield int.from_bytes(os.pread(file, _CLAIM_BYTES, 0), "little")
            finally:
                os.close(file)
