"""Files that tritonserver, or a process of it, reads as it answers: what is written into one is answered from at once.

Weights that lie beside their graph are mapped into memory by ONNX Runtime and OpenVINO. Which bytes these are does not
hang on what the path names by now, so they are watched by what was there when it was first seen.
"""

import contextlib
import hashlib
import os
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

from ..tritonserver.backend_processes import read_model_folder
from ..tritonserver.processes import has_mapped, kill, list_children, read_stat
from .published import Loaded
from .rollout import CANDIDATE_SUFFIX

_SUFFIXES = (".onnx.data", ".bin")

_BLOCK_BYTES = 1 << 20

# In the place of a size and a time of the last change, which no file has.
_UNREAD = (-1, -1)


class _Watched:
    """One file that is held open, whatever names it has.

    Attributes:
        path: Where it was found.
        inode: Its number.
        is_other: Whether its bytes are not those that were loaded, as far as they have been read.
    """

    def __init__(self, path: Path, digest: str) -> None:
        self.path = path
        self._digest = digest
        # What was read last; nothing where it is as it was when it was first seen.
        self._read_digest = ""
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        self.inode = os.fstat(self._descriptor).st_ino
        self._state = self._look()
        self._reader: threading.Thread | None = None

    @property
    def is_other(self) -> bool:
        return self._read_digest not in ("", self._digest)

    def expect(self, digest: str) -> None:
        """Have it hold what is loaded now, which may have been written into it in the place of what was before."""
        if digest != self._digest:
            # What was read before may be of any moment.
            self._digest, self._read_digest, self._state = digest, "", _UNREAD

    def look(self) -> None:
        """Begin to read it where it has been written into; a file of some gigabytes takes seconds."""
        if self._reader and self._reader.is_alive():
            return
        state = self._look()
        if state != self._state:
            before, self._state = self._state, state
            reader = threading.Thread(target=self._read, args=(state,), daemon=True)
            try:
                reader.start()
            except RuntimeError:
                # Without a thread it is read at the next look.
                self._state = before
                raise
            self._reader = reader

    def close(self) -> None:
        """Let go of it."""
        if self._reader:
            self._reader.join()
        os.close(self._descriptor)

    def _look(self) -> tuple[int, int]:
        stat = os.fstat(self._descriptor)
        return stat.st_size, stat.st_mtime_ns

    def _read(self, state: tuple[int, int]) -> None:
        digest, place = hashlib.sha256(), 0
        try:
            while block := os.pread(self._descriptor, _BLOCK_BYTES, place):
                digest.update(block)
                place += len(block)
        except OSError:
            # It is read again at the next look.
            self._state = _UNREAD
        else:
            # Else it is to be read once more: something else is expected of it since.
            if self._state == state:
                self._read_digest = digest.hexdigest()


class MappedFiles:
    """Watches the files of what is served that may be read as it answers."""

    def __init__(self) -> None:
        self._watched: dict[tuple[str, Path, int], _Watched] = {}
        # Held while files are opened: by the thread that looks, and by the one that loads.
        self._opening = threading.Lock()

    def open(self, loaded: Loaded) -> set[tuple[str, Path, int]]:
        """Watch the files of what is loaded, or about to be, and return what they are known by.

        A file is taken for what it was before when it is first seen, so that is to be before it is loaded.

        Raises:
            OSError: This process has no descriptor left to look with.
        """
        there = set()
        for path, digest in loaded.files.items():
            if path.name.endswith(_SUFFIXES):
                # It may be away, or be being put in the place of another.
                with contextlib.suppress(FileNotFoundError), self._opening:
                    key = loaded.published.name, path, path.stat().st_ino
                    there.add(key)
                    if key not in self._watched:
                        self._watched[key] = _Watched(path, digest)
                    self._watched[key].expect(digest)
        return there

    def look(self, served: Iterable[Loaded], pid: int) -> Mapping[str, Path]:
        """Return name → a file of it that a process reads and that has other bytes than those that were loaded.

        Args:
            served: What is loaded or being loaded.
            pid: Id of tritonserver's process.

        Raises:
            OSError: This process has no descriptor or memory left to look with.
        """
        there = {key for loaded in served for key in self.open(loaded)}
        found = {}
        for key, watched in [*self._watched.items()]:
            watched.look()
            if key in there and not watched.is_other:
                continue
            # What another has taken the place of is of no use any more once nobody reads it.
            if find_readers(watched.path, watched.inode, pid):
                if watched.is_other:
                    found[key[0]] = watched.path
            elif key not in there:
                self._watched.pop(key).close()
        return found

    def end_readers(self, path: Path, pid: int) -> bool:
        """End the processes that read a file that has changed, but for tritonserver's own; return whether any did.

        Args:
            path: As it was found.
            pid: Id of tritonserver's process.
        """
        numbers = {watched.inode for watched in self._watched.values() if watched.path == path and watched.is_other}
        readers = {reader for number in numbers for reader in find_readers(path, number, pid)} - {pid}
        for reader in readers:
            if stat := read_stat(reader):
                kill(reader, stat.started)
        return bool(readers)


def find_readers(path: Path, inode: int, pid: int) -> list[int]:
    """Return which of tritonserver's process and those that it started have a file of a model in their memory.

    A process of another model may have it as well, under a name of its own.
    """
    place = ""
    with contextlib.suppress(OSError):
        # By its name as well, unless that is another file's by now.
        place = os.path.realpath(path) if path.stat().st_ino == inode else ""
    readers = [each for each in (pid, *list_children(pid)) if has_mapped(each, place, inode)]
    return [each for each in readers if (folder := read_model_folder(each)) is None or _is_of(path, folder)]


def _is_of(path: Path, folder: Path) -> bool:
    """Tell whether a file is of the version of a model that is loaded from a folder, perhaps for a trial."""
    model = folder.parent.name.removesuffix(CANDIDATE_SUFFIX)
    return (model, folder.name) == (path.parent.parent.name, path.parent.name)
