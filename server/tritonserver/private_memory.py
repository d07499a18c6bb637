"""Keeps what callers send from other users of this machine, while it is in shared memory.

The Python backend of tritonserver 2.51 exchanges tensors with its processes in files in /dev/shm. It makes them with
mode 644, whatever the umask: it calls fchmod(fd, 0644) on each. For tritonserver and what it starts, exactly that call
does nothing, so the umask decides, and there is no moment in which another user could open such a file.
"""

import contextlib
import ctypes
import os
import platform
import stat
from pathlib import Path

# seccomp(2), prctl(2), and the calls' numbers by machine.
_SET_MODE_FILTER = 1
_SPEC_ALLOW = 1 << 2
_PR_SET_NO_NEW_PRIVS = 38
_NUMBERS = {
    # AUDIT_ARCH, fchmod, seccomp
    "x86_64": (0xC000003E, 91, 317),
    "aarch64": (0xC00000B7, 52, 277),
}

_PUBLIC_MODE = 0o644

# Classic BPF (linux/filter.h): load a word of struct seccomp_data, jump if equal, return.
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _SECOND_ARGUMENT_AT = 0, 4, 24
_ALLOW = 0x7FFF0000
# The call returns -errno without being made; of 0 that is success.
_DO_NOTHING = 0x00050000


class _Instruction(ctypes.Structure):
    """Struct sock_filter."""

    _fields_ = (("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("k", ctypes.c_uint32))


class _Program(ctypes.Structure):
    """Struct sock_fprog."""

    _fields_ = (("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction)))


_LIBC = ctypes.CDLL(None)


def _build_filter(architecture: int, fchmod: int) -> _Program:
    steps = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_JUMP_IF_EQUAL, 0, 5, architecture),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_JUMP_IF_EQUAL, 0, 3, fchmod),
        (_LOAD, 0, 0, _SECOND_ARGUMENT_AT),
        (_JUMP_IF_EQUAL, 0, 1, _PUBLIC_MODE),
        (_RETURN, 0, 0, _DO_NOTHING),
        (_RETURN, 0, 0, _ALLOW),
    ]
    instructions = (_Instruction * len(steps))(*(_Instruction(*step) for step in steps))
    return _Program(len(instructions), instructions)


# Made here: between fork and exec nothing should be allocated.
_FILTER = _build_filter(*_NUMBERS[platform.machine()][:2]) if platform.machine() in _NUMBERS else None


def keep_shared_memory_private() -> None:
    """Let whatever this process and its children make in shared memory be of mode 600; for good.

    Runs between fork and exec. Without rights of its own it takes the promise never to gain any (no_new_privs). Where a
    kernel has no such filter, `close_region` is what remains.
    """
    os.umask(0o077)
    if _FILTER is None:
        return
    _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    # Older kernels slow down whatever is filtered, unless told that it runs no code of strangers.
    _LIBC.syscall(_NUMBERS[platform.machine()][2], _SET_MODE_FILTER, _SPEC_ALLOW, ctypes.byref(_FILTER))


def close_region(path: Path) -> None:
    """Take the rights of other users off a file in shared memory, where it has any."""
    with contextlib.suppress(OSError):
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            path.chmod(0o600)
