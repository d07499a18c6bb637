"""What is another in a repository than at the look before."""

import contextlib
import glob
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from .model_text import CONFIG_FILE
from .published import Published, list_versions
from .sums import is_kept_aside


class Changes:
    """Looks at the files of a repository: looked at rather than waited for, as no notice of a change comes over NFS.

    Args:
        repository: The model repository.
    """

    def __init__(self, repository: Path) -> None:
        self._repository = repository
        # Of models that could not be served: what their files are, and which were others at the last look.
        self._files: dict[str, list[tuple[str, int, int]]] = {}
        self._changing: set[str] = set()
        # Folder of a version → when it was another last, and what was in it then.
        self._versions: dict[Path, tuple[int, object]] = {}

    def find_place(self) -> tuple[int, int] | None:
        """Return the file system and the folder that the repository is; None where it is away."""
        try:
            stat = self._repository.stat()
        except OSError:
            return None
        return stat.st_dev, stat.st_ino

    def look(self, served: Iterable[Published]) -> Mapping[str, object]:
        """Return what is another for a folder whenever its configuration, or the list of its versions or files, is.

        Of the version that is served, it is so for every single file.

        Raises:
            OSError: The repository cannot be looked at.
        """
        shown = {name: each.version for each in served if each.version for name in each.configs}
        found: dict[str, object] = {}
        paths = set[Path]()
        for folder in sorted(self._repository.iterdir()):
            try:
                numbered = [folder / str(version) for version in list_versions(folder)]
                paths.update(numbered)
                versions = [*map(self._describe_version, numbered)]
                stat = (folder / CONFIG_FILE).stat()
            except OSError:
                continue
            # The time of any change: of the mode as well, and of what is inside of a folder.
            found[folder.name] = (*versions, stat.st_ctime_ns, stat.st_size, stat.st_ino)
            if folder.name in shown:
                # Not under the name: that it is served is no change of what could not be.
                found[f"{folder.name}/"] = _list_files(folder / str(shown[folder.name]))
        self._versions = {path: known for path, known in [*self._versions.items()] if path in paths}
        return found

    def _describe_version(self, version: Path) -> object:
        """Return what is another whenever something in a folder came, went or took another's place.

        To load a model may leave something there, which makes it no other model.
        """
        stat = version.stat()
        known = self._versions.get(version)
        if known is None or known[0] != stat.st_ctime_ns:
            known = stat.st_ctime_ns, (stat.st_mode, stat.st_uid, stat.st_gid, _list_inside(version))
            self._versions[version] = known
        return known[1]

    def find_mended(self, failed: Mapping[str, int]) -> set[str]:
        """Return which models that could not be served had files changed, and have them changed no more.

        Args:
            failed: Name → version of those that could not; 0 for any.
        """
        now = {name: self.list_all(name, version) for name, version in failed.items()}
        changing = {name for name, files in now.items() if name in self._files and files != self._files[name]}
        settled = self._changing & now.keys() - changing
        self._files, self._changing = now, changing
        return settled

    def list_all(self, name: str, version: int) -> list[tuple[str, int, int]]:
        """Return path, time of change and size of each file of one version of a model and its steps; 0 for any."""
        folders = [self._repository / name, *self._repository.glob(f"{glob.escape(name)}_*")]
        versions = [
            folder / str(number) for folder in folders for number in ([version] if version else list_versions(folder))
        ]
        inside = [file for each in versions for file in _list_files(each)]
        return sorted([*inside, *_describe(folder / CONFIG_FILE for folder in folders)])


def _list_files(version: Path) -> list[tuple[str, int, int]]:
    """Return path, time of change and size of every file below the folder of a version."""
    paths: list[Path] = []
    for folder, folders, names in os.walk(version):
        folders[:] = [name for name in folders if not is_kept_aside(name)]
        paths += [Path(folder, name) for name in names if not is_kept_aside(name)]
    return sorted(_describe(paths))


def _list_inside(version: Path) -> object:
    """Return what lies in the folder of a version, whatever comes into a folder there."""
    try:
        paths = [path for path in version.iterdir() if not is_kept_aside(path.name)]
        folders = {path: path.stat().st_ino for path in paths if path.is_dir()}
    except PermissionError as exc:
        return exc.strerror
    return sorted(folders.items()), sorted(_describe(path for path in paths if path not in folders))


def _describe(paths: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Return the same of those files that are there."""
    found = []
    for path in paths:
        with contextlib.suppress(OSError):
            stat = path.stat()
            found.append((str(path), stat.st_ctime_ns, stat.st_size))
    return found
