"""Files of a repository, written so that each is whole at any moment and every change can be taken back."""

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

from tritonclient.grpc import model_config_pb2 as pb

from ..file_limit import is_full
from .config_file import CONFIG_FILE, find_config, refuse_no_file, render_config
from .contents import CLAIM_FILE, STAGED_CONFIG
from .undo import Undo

# What a file system without hard links answers to the attempt to make one.
_NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV}

# Has a file share the blocks of another until one of them is written (Linux, include/uapi/linux/fs.h).
_FICLONE = 0x40049409


def make_folder(folder: Path, undo: Undo) -> None:
    """Make a folder and those above it."""
    for path in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        # Only where it is empty: somebody else may have come to use it.
        undo.add_litter(path.rmdir)
        path.mkdir(exist_ok=True)


def claim_folder(folder: Path, config: pb.ModelConfig, undo: Undo) -> None:
    """Make a model's folder and say whose it is, before anything else lies in it and before anything is served."""
    make_folder(folder, undo)
    if (folder / CONFIG_FILE).exists() or (folder / CLAIM_FILE).exists():
        return
    undo.add(partial(give_up, folder))
    _stage_config(folder, config, undo).replace(folder / CLAIM_FILE)
    sync_folder(folder)


def give_up(folder: Path) -> None:
    """Remove what says whose a folder is, unless something lies there that the next publication must remove."""
    if {entry.name for entry in folder.iterdir()} <= {CLAIM_FILE, STAGED_CONFIG}:
        remove(folder / CLAIM_FILE)


def remove(path: Path) -> None:
    """Remove a file, if it is there: a disk that is mounted read-only refuses to remove what is not, too."""
    if os.path.lexists(path):
        path.unlink(missing_ok=True)


def write_configs(
    repository: Path, configs: Mapping[str, pb.ModelConfig], model_names: Iterable[str], undo: Undo
) -> None:
    """Replace the configurations of `model_names` that differ, each in one step that no reader sees half of."""
    for model_name in model_names:
        folder = repository / model_name
        refuse_no_file(folder / CONFIG_FILE)
        if find_config(folder) != configs[model_name]:
            _replace_config(folder, configs[model_name], undo)


def move(source: Path, target: Path, undo: Undo) -> None:
    """Rename a file or folder within its folder, where there is nothing of that name."""
    undo.add(partial(_move_back, source, target))
    source.rename(target)
    sync_folder(source.parent)


def copy(source: Path, target: Path) -> None:
    """Copy a file to the disk, or have both share their blocks where the file system can."""
    with _naming(target), source.open("rb") as read, target.open("wb") as written:
        try:
            fcntl.ioctl(written.fileno(), _FICLONE, read.fileno())
        except OSError:
            shutil.copyfile(source, target)
        os.fsync(written.fileno())


def link(source: Path, target: Path) -> None:
    """Give the file a second name, or make a copy where the file system has no hard links."""
    try:
        target.hardlink_to(source)
    except OSError as exc:
        if exc.errno not in _NO_LINKS:
            raise
        copy(source, target)


def write(target: Path, text: str) -> None:
    """Write a text to the disk."""
    with _naming(target), target.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Have the names in a folder reach the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _naming(target: Path) -> Iterator[None]:
    """Have an error of writing in the block name the file: `write` names none, and a copy names what it reads first."""
    try:
        yield
    except OSError as exc:
        if exc.filename is None or (exc.filename2 is not None and (is_full(exc) or exc.errno == errno.EFBIG)):
            exc.filename, exc.filename2 = str(target), None
        raise


def _replace_config(folder: Path, config: pb.ModelConfig, undo: Undo) -> None:
    path = folder / CONFIG_FILE
    staged = _stage_config(folder, config, undo)
    if path.exists():
        # Set aside first, so that the way back is a renaming, which needs no room on the disk.
        before = path.with_name(f"{STAGED_CONFIG}.{secrets.token_hex(4)}")
        undo.add_litter(partial(remove, before))
        link(path, before)
        undo.add(partial(before.replace, path))
    else:
        undo.add(partial(remove, path))
    staged.replace(path)
    sync_folder(folder)


def _stage_config(folder: Path, config: pb.ModelConfig, undo: Undo) -> Path:
    staged = folder / STAGED_CONFIG
    undo.add_litter(partial(remove, staged))
    # A link there would have another file written, and a pipe would be waited for.
    remove(staged)
    write(staged, render_config(config))
    return staged


def _move_back(source: Path, target: Path) -> None:
    # An interruption may come before or after the renaming.
    if not source.exists():
        target.rename(source)
