"""A pickle read as data: an opcode machine that imports nothing and calls only builders of our own.

Python's own `pickle` calls whatever a file names, hashes what it is told to and reserves the memory that a length
promises. This machine knows only the opcodes that picklers emit for data (protocols 2 to 5; Python's
`Lib/pickletools.py` defines each), has a limit on everything that grows, and never recurses.
"""

from __future__ import annotations

import gc
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import CheckpointError
from ..remedies import RECOPY_OR_USE_OLDER
from .inert_globals import may_be_called, may_be_mentioned, normalise_global

MAX_PICKLE_BYTES = 64 << 20
# Opcodes, and pairs unpacked by builders. 3 million take some 3 s and, at worst, about 500 MB.
MAX_STEPS = 3_000_000
MAX_MARKS = 1_000
# An int of 255 bytes is the longest that LONG1 holds; no setting of a trainer needs more.
_MAX_KEY_INT = 1 << 31
_MAX_KEY_LEAVES = 32
# Of text and bytes in one key. Two equal keys that are not one object are compared byte by byte, every time.
_MAX_KEY_CHARS = 4_096
# The longest full names of classes have some 200.
_MAX_NAME_CHARS = 1_024
# A name is a text of its own each time that it is put together.
_NAME_CHARS_PER_STEP = 32
# No function that a builder stands for takes more than 10. Whatever a builder takes apart is copied on each call.
_MAX_BUILDER_ARGS = 16


@dataclass(frozen=True)
class GlobalName:
    """A class or function that a pickle mentions, as its full name."""

    name: str


class Record:
    """What a pickle says of an object whose class we do not have: never more than data.

    Attributes:
        type_name: The full name of the class, or of the function that would have made the object.
        args: What it would have been called with.
        state: What would have become its attributes: a dict as a rule; None if nothing was said.
        items: What would have been appended, for subclasses of list and set.
        entries: What would have been set by key, for subclasses of dict.
    """

    __slots__ = ("args", "entries", "items", "state", "type_name")

    def __init__(self, type_name: str, args: tuple[Any, ...] = ()) -> None:
        self.type_name = type_name
        self.args = args
        self.state: Any = None
        self.items: list[Any] | None = None
        self.entries: dict[Any, Any] | None = None

    def field(self, name: str, default: Any = None) -> Any:
        """Return the attribute `name` out of the state, `default` where there is none."""
        # An object with __slots__ has the state (dict or None, dict of the slots).
        for part in self.state if isinstance(self.state, tuple) else (self.state,):
            if isinstance(part, dict) and name in part:
                return part[name]
        return default


class OpaqueKey:
    """A dict key that is not hashed, because a file could choose it so that hashing never ends."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class LongKeyError(Exception):
    """A dict key is longer than the name of anything; its length is the argument."""


# Called as builder(machine, args) → what the call in the pickle would have returned.
Builder = Callable[["InertUnpickler", tuple[Any, ...]], Any]


class InertUnpickler:
    """Reads one pickle.

    Args:
        data: The whole pickle.
        source: What to call it in messages.
        builders: Full name of a global → what makes the value of a call to it.
        constants: Full name of a global → the value that stands for it.
        load_persistent: Persistent id → value; pickles with persistent ids are refused where it is None.
        max_steps: How many opcodes are read at most.
    """

    def __init__(
        self,
        data: bytes,
        source: str,
        *,
        builders: Mapping[str, Builder],
        constants: Mapping[str, Any],
        load_persistent: Callable[[Any], Any] | None = None,
        max_steps: int = MAX_STEPS,
    ) -> None:
        self._data = data
        self._source = source
        self._builders = builders
        self._constants = constants
        self._load_persistent = load_persistent
        self._max_steps = max_steps
        self._steps = 0
        self._position = 0
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def load(self) -> Any:
        """Return what the pickle holds.

        It is made of Python's containers and scalars, `Record`, `GlobalName` and what the builders make. A set becomes
        a `Record` with `items`.

        Raises:
            CheckpointError: The pickle is damaged, too large, or names something that no checkpoint needs.
        """
        if len(self._data) > MAX_PICKLE_BYTES:
            raise self.refuse(f"a pickle of at most {MAX_PICKLE_BYTES} bytes", f"{len(self._data)} bytes")
        # Nothing is freed while loading, so looking for cycles again and again only makes it three times as slow.
        collecting = gc.isenabled()
        gc.disable()
        try:
            return self._run()
        except LongKeyError as exc:
            raise self.refuse(
                f"names of at most {_MAX_KEY_CHARS} characters",
                f"one of {exc}",
                remedy="give what is in it shorter names, and save it again",
            ) from exc
        # What damaged bytes lead to inside the opcodes below: too few bytes, too few values, values of other types.
        except (IndexError, ValueError, TypeError, KeyError, OverflowError, struct.error) as exc:
            raise self.refuse("a whole pickle", f"nonsense at byte {self._position} ({type(exc).__name__})") from exc
        finally:
            if collecting:
                gc.enable()

    def charge(self, steps: int) -> None:
        """Count work that a builder does for one call, so that no pickle can ask for more than the limit."""
        self._steps += steps
        if self._steps > self._max_steps:
            raise self.refuse(f"at most {self._max_steps} steps", "more")

    def charge_name(self, length: int) -> None:
        """Count what it takes to put together and keep a full name of `length` characters."""
        if length > _MAX_NAME_CHARS:
            raise self.refuse(f"names of at most {_MAX_NAME_CHARS} characters", f"one of {length}")
        self.charge(length // _NAME_CHARS_PER_STEP)

    def call_builder(self, builder: Builder, args: tuple[Any, ...]) -> Any:
        """Return what `builder` makes of `args`, unless they are more than any function takes."""
        if len(args) > _MAX_BUILDER_ARGS:
            raise ValueError("more arguments than the function takes")
        return builder(self, args)

    def refuse(self, expected: str, got: str, *, remedy: str = RECOPY_OR_USE_OLDER) -> CheckpointError:
        """Return the error for this pickle."""
        return CheckpointError(
            f"{self._source} cannot be read",
            expected=expected,
            got=got,
            remedy=remedy,
        )

    def _run(self) -> Any:
        data, actions = self._data, _ACTIONS
        while True:
            self.charge(1)
            opcode = data[self._position]
            self._position += 1
            if opcode == _STOP:
                break
            action = actions.get(opcode)
            if action is None:
                raise self.refuse("opcodes that picklers emit for data", f"{opcode:#04x} at byte {self._position - 1}")
            action(self)
        if len(self._stack) != 1 or self._marks:
            raise self.refuse("one value at the pickle's end", f"{len(self._stack)}")
        return self._stack[0]

    def _take(self, length: int) -> bytes:
        """Return the next `length` bytes of the pickle."""
        end = self._position + length
        if length < 0 or end > len(self._data):
            raise ValueError("the pickle ends early")
        part = self._data[self._position : end]
        self._position = end
        return part

    def _take_int(self, length: int) -> int:
        return int.from_bytes(self._take(length), "little")

    def _take_line(self) -> str:
        end = self._data.index(b"\n", self._position)
        return self._take(end + 1 - self._position)[:-1].decode("utf-8")

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _pop(self) -> Any:
        if self._marks and len(self._stack) <= self._marks[-1]:
            raise IndexError("nothing above the mark")
        return self._stack.pop()

    def _pop_to_mark(self) -> list[Any]:
        start = self._marks.pop()
        values = self._stack[start:]
        del self._stack[start:]
        return values

    def _mark(self) -> None:
        if len(self._marks) >= MAX_MARKS:
            raise self.refuse(f"at most {MAX_MARKS} values within each other", "more")
        self._marks.append(len(self._stack))

    def _push_tuple(self, length: int) -> None:
        values = [self._pop() for _ in range(length)]
        self._push(tuple(reversed(values)))

    def _append(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if isinstance(target, Record):
            target.items = target.items or []
            target.items.extend(values)
        elif isinstance(target, list):
            target.extend(values)
        else:
            raise TypeError("values appended to no list")

    def _set_items(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if isinstance(target, Record):
            target.entries = {} if target.entries is None else target.entries
            target = target.entries
        if not isinstance(target, dict) or len(values) % 2:
            raise TypeError("items set in no dict")
        for key, value in zip(values[::2], values[1::2], strict=True):
            target[hashable(key)] = value

    def _memoize(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    def _mention(self, module: str, name: str) -> Any:
        """Return what stands for the global `module.name`, or refuse the file for naming it."""
        self.charge_name(len(module) + len(name))
        full_name = normalise_global(module, name)
        if full_name in self._constants:
            return self._constants[full_name]
        if full_name not in self._builders and not may_be_mentioned(full_name):
            # Whether it is called shows only further on.
            raise self._refuse_global("call or keep", full_name)
        return GlobalName(full_name)

    def _refuse_global(self, would: str, full_name: str) -> CheckpointError:
        return CheckpointError(
            f"{self._source} would {would} {full_name} when it is loaded by pickle",
            expected="tensors and plain data",
            got=f"the global {full_name}, which is not known to be harmless",
            remedy="save it without that, and open this file with other tools only if you trust where it came from; "
            "nothing of it was run here",
        )

    def _call(self, function: Any, args: Any) -> Any:
        if not isinstance(function, GlobalName) or not isinstance(args, tuple):
            raise TypeError("a call of what is not a global")
        builder = self._builders.get(function.name)
        if builder is not None:
            return self.call_builder(builder, args)
        if not may_be_called(function.name):
            raise self._refuse_global("call", function.name)
        return Record(function.name, args)

    def _new_object(self, args: Any) -> None:
        cls = self._pop()
        # `cls.__new__` makes an empty object and runs no code of a data class, so a lower-case name passes here.
        if not isinstance(cls, GlobalName) or not isinstance(args, tuple):
            raise TypeError("an object of what is not a class")
        builder = self._builders.get(cls.name)
        self._push(Record(cls.name, args) if builder is None else self.call_builder(builder, args))

    def _build(self) -> None:
        state = self._pop()
        target = self._stack[-1]
        if isinstance(target, Record):
            target.state = state
        # The attributes of a state dict (`_metadata`) say nothing about values. Tensors are saved without any, and
        # torch's `Tensor.__setstate__` would put another storage into one.
        elif not isinstance(target, (dict, list)):
            raise TypeError("attributes for what has none")

    def _put_global(self) -> None:
        module, name = self._take_line(), self._take_line()
        self._push(self._mention(module, name))

    def _put_stack_global(self) -> None:
        name, module = self._pop(), self._pop()
        if not isinstance(module, str) or not isinstance(name, str):
            raise TypeError("a global without a name")
        self._push(self._mention(module, name))

    def _put_instance(self) -> None:
        module, name = self._take_line(), self._take_line()
        args = tuple(self._pop_to_mark())
        self._push(self._call(self._mention(module, name), args))

    def _put_reduced(self) -> None:
        args = self._pop()
        self._push(self._call(self._pop(), args))

    def _put_new_object_with_keywords(self) -> None:
        keywords = self._pop()
        args = self._pop()
        self.charge(len(args))
        self._new_object((*args, keywords) if keywords else args)

    def _put_persistent(self) -> None:
        if self._load_persistent is None:
            raise self.refuse("a pickle without outer references", "one with them")
        self._push(self._load_persistent(self._pop()))

    def _discard(self) -> None:
        self._pop()

    def _discard_to_mark(self) -> None:
        self._pop_to_mark()

    def _skip_frame(self) -> None:
        # How much a reader of a stream should read ahead; the whole pickle is here already.
        self._take(8)

    def _check_protocol(self) -> None:
        protocol = self._take_int(1)
        if protocol > 5:
            raise self.refuse("a pickle protocol up to 5", str(protocol))


def hashable(key: Any) -> Any:
    """Return `key` if hashing and comparing it is cheap whatever a file made of it, else an `OpaqueKey` around it.

    Raises:
        LongKeyError: The key is longer than the name of anything.
    """
    return key if _is_cheap_key(key) else OpaqueKey(key)


def _is_cheap_key(key: Any) -> bool:
    leaves = [key]
    count = chars = 0
    while leaves:
        leaf = leaves.pop()
        count += 1
        if isinstance(leaf, (str, bytes)):
            chars += len(leaf)
            if chars > _MAX_KEY_CHARS:
                raise LongKeyError(chars)
            continue
        if isinstance(leaf, tuple) and len(leaf) + count + len(leaves) <= _MAX_KEY_LEAVES:
            leaves.extend(leaf)
        # Larger ints are hashed modulo 2**61 - 1: a file could choose a million of one hash.
        elif isinstance(leaf, int) and abs(leaf) < _MAX_KEY_INT:
            continue
        elif not (leaf is None or isinstance(leaf, (GlobalName, Record))):
            return False
    return True


def _take_signed(machine: InertUnpickler, length: int) -> int:
    return int.from_bytes(machine._take(length), "little", signed=True)


def _take_text(machine: InertUnpickler, length_bytes: int) -> str:
    # `surrogatepass` is how pickle writes text that is not valid Unicode (Lib/pickle.py, save_str).
    return machine._take(machine._take_int(length_bytes)).decode("utf-8", "surrogatepass")


def _take_old_text(machine: InertUnpickler, length_bytes: int) -> str:
    # Python 2's str: bytes and text alike. Latin-1 keeps each byte.
    return machine._take(machine._take_int(length_bytes)).decode("latin-1")


_STOP = ord(".")

_ACTIONS: dict[int, Callable[[InertUnpickler], None]] = {
    0x80: InertUnpickler._check_protocol,
    0x95: InertUnpickler._skip_frame,
    ord("("): InertUnpickler._mark,
    ord("0"): InertUnpickler._discard,
    ord("1"): InertUnpickler._discard_to_mark,
    ord("2"): lambda m: m._push(m._stack[-1]),
    ord("N"): lambda m: m._push(None),
    0x88: lambda m: m._push(True),
    0x89: lambda m: m._push(False),
    ord("K"): lambda m: m._push(m._take_int(1)),
    ord("M"): lambda m: m._push(m._take_int(2)),
    ord("J"): lambda m: m._push(_take_signed(m, 4)),
    0x8A: lambda m: m._push(_take_signed(m, m._take_int(1))),
    ord("G"): lambda m: m._push(struct.unpack(">d", m._take(8))[0]),
    ord("X"): lambda m: m._push(_take_text(m, 4)),
    0x8C: lambda m: m._push(_take_text(m, 1)),
    0x8D: lambda m: m._push(_take_text(m, 8)),
    ord("T"): lambda m: m._push(_take_old_text(m, 4)),
    ord("U"): lambda m: m._push(_take_old_text(m, 1)),
    ord("B"): lambda m: m._push(m._take(m._take_int(4))),
    ord("C"): lambda m: m._push(m._take(m._take_int(1))),
    0x8E: lambda m: m._push(m._take(m._take_int(8))),
    0x96: lambda m: m._push(m._take(m._take_int(8))),
    ord("]"): lambda m: m._push([]),
    ord("}"): lambda m: m._push({}),
    ord(")"): lambda m: m._push(()),
    0x85: lambda m: m._push_tuple(1),
    0x86: lambda m: m._push_tuple(2),
    0x87: lambda m: m._push_tuple(3),
    ord("t"): lambda m: m._push(tuple(m._pop_to_mark())),
    ord("l"): lambda m: m._push(m._pop_to_mark()),
    ord("a"): lambda m: m._append([m._pop()]),
    ord("e"): lambda m: m._append(m._pop_to_mark()),
    ord("s"): lambda m: m._set_items([m._pop(), m._pop()][::-1]),
    ord("u"): lambda m: m._set_items(m._pop_to_mark()),
    # Sets are records with items: nothing that a file chose is hashed for them.
    0x8F: lambda m: m._push(Record("builtins.set")),
    0x90: lambda m: m._append(m._pop_to_mark()),
    0x91: lambda m: m._push(Record("builtins.frozenset", (m._pop_to_mark(),))),
    ord("q"): lambda m: m._memoize(m._take_int(1)),
    ord("r"): lambda m: m._memoize(m._take_int(4)),
    0x94: lambda m: m._memoize(len(m._memo)),
    ord("h"): lambda m: m._push(m._memo[m._take_int(1)]),
    ord("j"): lambda m: m._push(m._memo[m._take_int(4)]),
    ord("c"): InertUnpickler._put_global,
    0x93: InertUnpickler._put_stack_global,
    ord("i"): InertUnpickler._put_instance,
    ord("R"): InertUnpickler._put_reduced,
    0x81: lambda m: m._new_object(m._pop()),
    0x92: InertUnpickler._put_new_object_with_keywords,
    ord("b"): InertUnpickler._build,
    ord("Q"): InertUnpickler._put_persistent,
}
