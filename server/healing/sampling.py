"""Which code a busy process runs, as a debugger sees it: this distinguishes a loop in Python from a long inference.

/proc does not show it: both use a core and answer nothing. The instruction pointer does: a model that computes is
inside ONNX Runtime, torch or numpy; one that loops in Python is inside the interpreter, look after look.
"""

import ctypes
import enum
import os
import platform
import re
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


# What CPython consists of: its library, and its modules that are libraries of their own.
_LIBPYTHON = re.compile(r"/libpython3[^/]*$")
_STANDARD_MODULE = re.compile(r"/lib-dynload/[^/]*$")

# What everything uses, the interpreter and whatever computes alike, and what the kernel maps in.
_COMMON = re.compile(r"/(libc|libm|libpthread|ld-linux[^/]*|ld-musl[^/]*)[.-][^/]*$|^\[")


class Code(enum.Enum):
    """Whose code a thread runs."""

    INTERPRETER = enum.auto()
    LIBRARY = enum.auto()
    COMMON = enum.auto()


class _Buffer(ctypes.Structure):
    """Struct iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def find_code(pid: int) -> Code | None:
    """Return whose code the main thread of process `pid` runs at this moment; None where we may not know."""
    found: list[int] = []
    # A tracer is a thread, and the kernel lets go of all that it traces when it ends, whatever happened to it.
    thread = threading.Thread(target=_sample, args=(pid, found), daemon=True)
    thread.start()
    thread.join(_TIMEOUT_S)
    return _classify(pid, found[0]) if found else None


def _sample(pid: int, found: list[int]) -> None:
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
        found.append(registers[_INSTRUCTION_POINTER])


def _classify(pid: int, address: int) -> Code | None:
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(errors="surrogateescape")
        executable = Path(f"/proc/{pid}/exe").readlink()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    # address range, rights, offset, device, inode, and the path where there is one
    mappings = [line.split(None, 5) for line in maps.splitlines()]
    paths = {fields[0]: fields[5] if len(fields) > 5 else "" for fields in mappings}
    found = [path for addresses, path in paths.items() if _is_within(address, addresses)]
    if not found:
        return None
    (path,) = found
    # An interpreter without a library of its own is part of the program that runs it.
    is_linked_in = not any(_LIBPYTHON.search(other) for other in paths.values())
    if _LIBPYTHON.search(path) or _STANDARD_MODULE.search(path) or (is_linked_in and path == str(executable)):
        return Code.INTERPRETER
    # Code made in memory has no path, and is made to compute.
    return Code.COMMON if _COMMON.search(path) else Code.LIBRARY


def _is_within(address: int, addresses: str) -> bool:
    start, end = (int(number, 16) for number in addresses.split("-"))
    return start <= address < end
