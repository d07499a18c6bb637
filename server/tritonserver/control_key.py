"""The key that opens tritonserver's control endpoints: made once, kept in a file, and taken out of the process list."""

import os
import re
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import KeyFileError
from ..shortage import is_shortage
from .processes import read_stat

HEADER = "modelyard-key"

# What loads code, changes what is served, or reads another caller's memory. Statistics stay open: perf_analyzer and
# the client read them, and they tell no more than the metrics do.
RESTRICTED = ("model-repository", "trace", "logging", "shared-memory")

_LINE = re.compile(rf"{HEADER}: ([0-9a-f]{{64}})\n")


@dataclass(frozen=True)
class ControlKey:
    """The secret value; it never appears in a representation of this object."""

    value: str = field(repr=False)

    @property
    def headers(self) -> dict[str, str]:
        """The HTTP header that opens the control endpoints."""
        return {HEADER: self.value}

    @property
    def grpc_headers(self) -> dict[str, str]:
        """The same over gRPC."""
        return {f"triton-grpc-protocol-{HEADER}": self.value}

    @property
    def options(self) -> list[str]:
        """The options that close tritonserver's control endpoints to everyone without the key."""
        restriction = f"{','.join(RESTRICTED)}:{HEADER}={self.value}"
        return [f"--http-restricted-api={restriction}", f"--grpc-restricted-protocol={restriction}"]

    def redact(self, line: bytes) -> bytes:
        """Return `line` without the key, for a log."""
        return line.replace(self.value.encode(), b"(key)")


def open_key(path: Path) -> ControlKey:
    """Return the key in `path`, which is made with mode 600 where there is none.

    The file holds one header line, so that `curl -H @FILE` sends it and it stands on no command line.

    Raises:
        KeyFileError: The file holds something else, cannot be used, or others can read or replace it.
    """
    try:
        _create(path)
        with path.open(encoding="ascii", errors="replace") as file:
            _check_private(path, os.fstat(file.fileno()))
            line = _LINE.fullmatch(file.read(200))
    except OSError as exc:
        raise KeyFileError(
            f"the control key {path} cannot be used",
            expected="a file that this user may write",
            got=f"'{exc.strerror}'",
            remedy="pass another --key-file",
        ) from exc
    if line is None:
        raise KeyFileError(
            f"{path} holds no control key",
            expected=f"one line '{HEADER}: ' and 64 hexadecimal digits",
            got="something else",
            remedy="remove the file; the next start makes a new one",
        )
    return ControlKey(line[1])


def hide_key(key: ControlKey, pid: int) -> bool:
    """Overwrite the key in the command line that other users of this machine read of process `pid`.

    tritonserver takes the key as an argument alone and copies it while it parses them, so this is done once its
    parsing is over. Only a process's own memory is written to, as a debugger of the same user may.

    Returns:
        Whether the command line holds no key now.

    Raises:
        OSError: This process has no descriptor left for it.
    """
    try:
        stat = read_stat(pid)
        if stat is None:
            return False
        start, end = stat.arguments
        with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
            memory.seek(start)
            arguments = memory.read(end - start)
            for match in re.finditer(re.escape(key.value.encode()), arguments):
                memory.seek(start + match.start())
                memory.write(b"x" * len(key.value))
        return key.value.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (OSError, IndexError, ValueError, OverflowError) as exc:
        if is_shortage(exc):
            raise
        return False


def _create(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Written beside it and linked, so that a second server that starts now reads a whole key or makes none.
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    if path.exists():
        return
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"{HEADER}: {secrets.token_hex(32)}\n")
        try:
            os.link(draft, path)
        except FileExistsError:
            return
    finally:
        draft.unlink(missing_ok=True)


def _check_private(path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise KeyFileError(
            f"the control key {path} is open to others",
            expected=f"mode 600 and user {os.geteuid()}",
            got=f"mode {stat.S_IMODE(status.st_mode):o} and user {status.st_uid}",
            remedy="remove the file; the next start makes a new one",
        )
