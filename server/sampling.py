"""In which library a busy process is, as a debugger sees it: what tells a loop in Python from a long inference.

/proc does not tell: both use a core and answer nothing. The instruction pointer does: a model that computes is inside
ONNX Runtime, torch or numpy; one that loops in Python is inside the interpreter, look after look.
"""

import ctypes
import os
import platform
import threading
from pathlib import Path

# ptrace(2). Seized, a process is neither stopped by us nor told of us but for the moment in which it is asked.
_SEIZE, _INTERRUPT, _GET_REGISTERS, _DETACH = 0x4206, 0x4207, 0x4204, 17
_NT_PRSTATUS = 1
_WAIT_FOR_ANY_THREAD = 0x40000000

# Index of the instruction pointer among the registers of NT_PRSTATUS (user_regs_struct, user_pt_regs).
_INSTRUCTION_POINTER = {"x86_64": 16, "aarch64": 32}.get(platform.machine())

# A process stops for us when it next gets a core.
_TIMEOUT_S = 0.5


class _Buffer(ctypes.Structure):
    """Struct iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def find_library(pid: int) -> str | None:
    """Return the file whose code the main thread of process `pid` runs at this moment.

    Returns:
        Its path, a name such as `[vdso]`, or an empty text for code made in memory; None where we may not know.
    """
    found: list[str] = []
    # A tracer is a thread, and the kernel lets go of all that it traces when it ends, whatever happened to it.
    thread = threading.Thread(target=_sample, args=(pid, found), daemon=True)
    thread.start()
    thread.join(_TIMEOUT_S)
    return found[0] if found else None


def _sample(pid: int, found: list[str]) -> None:
    if _INSTRUCTION_POINTER is None:
        return
    libc = ctypes.CDLL(None)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    if libc.ptrace(_SEIZE, pid, None, None):
        return
    libc.ptrace(_INTERRUPT, pid, None, None)
    try:
        _, status = os.waitpid(pid, _WAIT_FOR_ANY_THREAD)
    except OSError:
        return
    if not os.WIFSTOPPED(status):
        return
    registers = (ctypes.c_uint64 * 64)()
    buffer = _Buffer(ctypes.addressof(registers), ctypes.sizeof(registers))
    failed = libc.ptrace(_GET_REGISTERS, pid, _NT_PRSTATUS, ctypes.addressof(buffer))
    # A signal that arrived just now is passed on.
    libc.ptrace(_DETACH, pid, None, os.WSTOPSIG(status) if status >> 16 == 0 else 0)
    if not failed:
        found += _find_mapping(pid, registers[_INSTRUCTION_POINTER])


def _find_mapping(pid: int, address: int) -> list[str]:
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []
    for line in lines:
        # address range, rights, offset, device, inode, and the path where there is one
        fields = line.split(None, 5)
        start, end = (int(number, 16) for number in fields[0].split("-"))
        if start <= address < end:
            return [fields[5] if len(fields) > 5 else ""]
    return []
