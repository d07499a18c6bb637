"""One run's files in several folders, as ranks leave them on the disks of their nodes, seen as one folder."""

from __future__ import annotations

import atexit
import filecmp
import os
import shlex
import shutil
import tempfile
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from ...errors import CheckpointError, show_path_as
from .paths import let_links_into

# What each node writes of its own and no reader reads; of these the first folder's are seen.
_OF_ONE_NODE = (
    "training_args.bin",
    "scheduler.*",
    "scaler.*",
    "rng_state*",
    "random_states_*",
    "*.log",
    "*.md",
    "*.py",
)
# What ext4 makes at the root of a disk, for root alone.
_NEVER = "lost+found"


def join_folders(folders: Sequence[Path]) -> Path:
    """Return a folder of links to every file of `folders`, below each folder's own structure; one folder as it is.

    It is removed when the process ends. Sentences about it name the folders, as a shell would: `{node0,node1}`.

    Raises:
        CheckpointError: One of them is no folder, is named twice, or holds another file under the same name.
    """
    if len(folders) == 1:
        return folders[0]
    for folder in folders:
        if not folder.is_dir():
            raise CheckpointError(
                f"there is no checkpoint folder {folder}",
                expected="a folder with a part of the run's files",
                got="a file" if folder.exists() else "nothing",
                remedy="several paths are taken for the folders of one run; pass folders alone",
            )
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise CheckpointError(
            f"one folder is named twice among {', '.join(map(str, folders))}",
            expected="different folders",
            got="two equal",
        )
    joined = Path(tempfile.mkdtemp(prefix="modelyard-joined-")).resolve()
    atexit.register(shutil.rmtree, joined, ignore_errors=True)
    let_links_into(joined, [folder.resolve() for folder in folders])
    named = ",".join(shlex.quote(str(folder)) for folder in folders)
    show_path_as(str(joined), f"{{{named}}}")
    for folder in folders:
        _link_all(folder.absolute(), joined)
    return joined


def _link_all(folder: Path, joined: Path) -> None:
    for entry in sorted(folder.iterdir()):
        place = joined / entry.name
        if entry.name == _NEVER:
            continue
        if entry.is_dir() and not entry.is_symlink() and (place.is_dir() or not os.path.lexists(place)):
            place.mkdir(exist_ok=True)
            _link_all(entry, place)
        elif not os.path.lexists(place):
            place.symlink_to(entry)
        elif not any(fnmatch(entry.name, pattern) for pattern in _OF_ONE_NODE):
            _refuse_another(entry, place)


def _refuse_another(entry: Path, place: Path) -> None:
    if entry.is_file() and place.is_file() and filecmp.cmp(entry, place, shallow=False):
        return
    raise CheckpointError(
        f"{entry} and {place.readlink() if place.is_symlink() else place} are two different files of one name",
        expected="the folders of one save, in which files of one name are equal",
        got="other bytes",
        remedy="pass the folders of one run and one step",
    )
