"""How the files of a checkpoint are opened: inside its folder, regular ones only, small ones within a limit."""

from __future__ import annotations

import codecs
import errno
import json
import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from ...errors import CheckpointError
from ..remedies import RECOPY, find_remedy

# The largest that are known are tokenizers, of some 35 MB.
MAX_JSON_BYTES = 64 << 20
# Brackets and commas, so that every value but one follows one of them: 4 million take 400 MB at worst as Python's
# objects, `{"":0}` being the dearest. A tokenizer of 500,000 merges has 1.5 million.
_MAX_JSON_VALUES = 4_000_000

# How such a file begins (git-lfs, docs/spec.md).
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


# What editors and shells of Windows begin a file with, and neither transformers nor tokenizers reads.
_BYTE_ORDER_MARKS = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_LONGEST_MARK = max(map(len, _BYTE_ORDER_MARKS))
_SAVE_WITHOUT_MARK = "save it as UTF-8 without a byte order mark"

# Folder of links → the folders that its links may lead into.
_LINKED: dict[Path, tuple[Path, ...]] = {}


def let_links_into(directory: Path, parts: Sequence[Path]) -> None:
    """Let links in `directory`, which this process made, lead into `parts`; all of these are resolved paths."""
    _LINKED[directory] = tuple(parts)


def find_linked(path: Path) -> Path:
    """Return what a link in such a folder leads to; any other path as it is."""
    return path.readlink() if any(path.is_relative_to(linked) for linked in _LINKED) else path


def check_inside(path: Path, directory: Path) -> None:
    """Refuse a symbolic link at `path` that leads out of `directory`.

    The download cache of Hugging Face is let through: `models--NAME/snapshots/REVISION/FILE` links to
    `models--NAME/blobs/HASH` by design (huggingface_hub, "Understand caching").

    Raises:
        CheckpointError: `path` resolves to somewhere else, or to itself.
    """
    try:
        root, target = directory.resolve(), path.resolve()
    # RuntimeError: what Python below 3.13 makes of a link to itself.
    except (OSError, RuntimeError) as exc:
        raise CheckpointError(
            f"{path} leads nowhere",
            expected="a file in the checkpoint",
            got=(exc.strerror if isinstance(exc, OSError) else None) or "a link to itself",
            remedy=RECOPY,
        ) from exc
    parts = (part for linked, parts in _LINKED.items() if root.is_relative_to(linked) for part in parts)
    if any(target.is_relative_to(allowed) for allowed in (root, *parts)):
        return
    # A module of Sentence-Transformers has a folder within the revision's.
    folders = (folder.parent for folder in (root, *root.parents) if folder.parent.name == "snapshots")
    if any(target.parent == folder.parent / "blobs" for folder in folders):
        return
    raise CheckpointError(
        f"{path} is a link that leads outside {directory}",
        expected="a file in the checkpoint",
        got=str(target),
        remedy="copy the file itself into the folder if you trust it",
    )


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading, unbuffered. A FIFO would wait for ever, and a device may never end.

    Raises:
        CheckpointError: It cannot be opened, or is something else.
    """
    try:
        # Without O_NONBLOCK, opening a FIFO waits for who writes to it.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    # ValueError: a zero byte in the name.
    except (OSError, ValueError) as exc:
        got = exc.strerror if isinstance(exc, OSError) else None
        # What Linux says of a socket, and of a device that is not there.
        if isinstance(exc, OSError) and exc.errno == errno.ENXIO:
            raise _describe_irregular(path, path.stat().st_mode) from exc
        remedy = find_remedy(exc)
        raise CheckpointError(
            f"{path} cannot be opened", expected="a file", got=got or str(exc), remedy=remedy
        ) from exc
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise _describe_irregular(path, mode)
    return os.fdopen(descriptor, "rb", buffering=0)


def refuse_lfs_pointer(path: Path) -> None:
    """Refuse the text that a clone has in a file's place where Git LFS is not installed.

    Raises:
        CheckpointError: It is that.
    """
    with open_regular(path) as file:
        _refuse_pointing(path, file.read(len(_LFS_POINTER)))


def _refuse_pointing(path: Path, data: bytes) -> None:
    if data.startswith(_LFS_POINTER):
        raise CheckpointError(
            f"{path} is a pointer of Git LFS",
            expected="the file that it points to",
            got=f"{path.stat().st_size} bytes of text",
            remedy="fetch it by `git lfs install` and `git lfs pull`",
        )


def _describe_irregular(path: Path, mode: int) -> CheckpointError:
    return CheckpointError(
        f"{path} is not a regular file",
        expected="a file",
        got=_KINDS.get(stat.S_IFMT(mode), "something else"),
        remedy="put the file itself there",
    )


def refuse_broken_link(path: Path) -> None:
    """Refuse a link that leads nowhere, as a download's cache leaves them where it is copied in part.

    Raises:
        CheckpointError: `path` is such a link.
    """
    # A link in a circle exists as little.
    if path.is_symlink() and not path.exists():
        raise CheckpointError(
            f"{path} is a link that leads nowhere",
            expected="a file behind it",
            got=f"a link to {path.readlink()}",
            remedy="copy the folder again with the files that its links lead to, as `cp -rL` does",
        )


def refuse_broken_links(directory: Path) -> None:
    """Refuse a folder with a link that leads nowhere, which may be what is missing in it.

    Raises:
        CheckpointError: It has one.
    """
    for path in sorted(directory.iterdir()):
        refuse_broken_link(path)


def is_taken(path: Path) -> bool:
    """Tell whether something other than a folder bears the name of a file, be it a FIFO or a link to nothing."""
    return os.path.lexists(path) and not path.is_dir()


def has_file(path: Path) -> bool:
    """Tell whether there is a file. What bears its name and is none must not pass for absent, as it does for `is_file`.

    Raises:
        CheckpointError: A link to nothing, a FIFO, a folder or the like is there, or it cannot be opened.
    """
    if not os.path.lexists(path):
        return False
    open_regular(path).close()
    return True


def refuse_irregular(directory: Path, names: Iterable[str]) -> None:
    """Refuse what is there under the name of a file and is none, such as a FIFO, which else counts as not there.

    Raises:
        CheckpointError: One is.
    """
    for name in names:
        refuse_broken_link(directory / name)
        has_file(directory / name)


def read_small(path: Path, *, max_bytes: int) -> bytes:
    """Return all bytes of a regular file.

    Raises:
        CheckpointError: It cannot be read, is not a regular file, is longer than `max_bytes`, or is a pointer of Git
            LFS.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise CheckpointError(
                f"{path} is too large", expected=f"at most {max_bytes} bytes", got=str(size), remedy=RECOPY
            )
        try:
            # One call may return less, and a file may grow while it is read.
            parts, left = [], max_bytes
            while left and (part := file.read(left)):
                parts.append(part)
                left -= len(part)
        except OSError as exc:
            raise CheckpointError(
                f"{path} cannot be read", got=exc.strerror or str(exc), remedy=find_remedy(exc)
            ) from exc
    data = b"".join(parts)
    _refuse_pointing(path, data)
    return data


def parse_json(data: bytes, **options: Any) -> Any:
    """Return what the JSON text in `data` says; `options` are those of `json.loads`.

    Raises:
        ValueError: It is not JSON in UTF-8, or holds more than a few hundred megabytes can.
    """
    if data.startswith(codecs.BOM_UTF8):
        raise ValueError("a byte order mark in front")
    if sum(data.count(mark) for mark in (b",", b"[", b"{")) > _MAX_JSON_VALUES:
        raise ValueError(f"more than {_MAX_JSON_VALUES} values")
    try:
        return json.loads(data.decode("utf-8"), **options)
    except RecursionError as exc:
        raise ValueError("values nested too deeply") from exc


def find_json_remedy(data: bytes) -> str:
    """Return what to do about a file whose bytes are not JSON."""
    return _SAVE_WITHOUT_MARK if data.startswith(_BYTE_ORDER_MARKS) else RECOPY


def refuse_spoiled_texts(directory: Path, names: Iterable[str]) -> None:
    """Refuse files that begin with a byte order mark or are pointers of Git LFS, as far as they are there.

    Raises:
        CheckpointError: One does or is, or cannot be read.
    """
    for path in (directory / name for name in names):
        if os.path.lexists(path):
            refuse_lfs_pointer(path)
            with open_regular(path) as file:
                if file.read(_LONGEST_MARK).startswith(_BYTE_ORDER_MARKS):
                    raise CheckpointError(
                        f"{path} cannot be read",
                        expected="UTF-8",
                        got="a byte order mark in front",
                        remedy=_SAVE_WITHOUT_MARK,
                    )


def read_json(path: Path, *, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Return what a JSON file of a checkpoint holds.

    Raises:
        CheckpointError: It cannot be read, is not a regular file, is too large, or is not JSON.
    """
    data = read_small(path, max_bytes=max_bytes)
    try:
        return parse_json(data)
    except ValueError as exc:
        raise CheckpointError(
            f"{path} cannot be read",
            expected="JSON",
            got=f"{len(data)} bytes ({str(exc).rstrip('.')})",
            remedy=find_json_remedy(data),
        ) from exc


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object that a file of a checkpoint holds.

    Raises:
        CheckpointError: As `read_json`, or it holds another value.
    """
    content = read_json(path)
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{path} cannot be read",
            expected="a JSON object",
            got=json.dumps(content)[:100],
            remedy=RECOPY,
        )
    return content


def read_json_if_any(path: Path) -> dict[str, Any] | None:
    """Return the JSON object that a file beside the weights holds, or None where there is no such file.

    Raises:
        CheckpointError: It holds no JSON object, is not a regular file, or is too large.
    """
    return read_json_object(path) if os.path.lexists(path) else None


def read_json_beside(path: Path) -> dict[str, Any]:
    """Return the JSON object that may lie beside the weights; empty where there is no file, or no such object in it.

    Raises:
        CheckpointError: Something is there that cannot be opened, is not a regular file, or is too large.
    """
    if not os.path.lexists(path):
        return {}
    try:
        content = parse_json(read_small(path, max_bytes=MAX_JSON_BYTES))
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}
