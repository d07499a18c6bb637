"""Feeds the readers with damaged and hostile files: nothing but `CheckpointError` may come out, soon and in bounds.

    python -m benches.fuzz_torch_zip [--inputs 20000] [--seed 1] [--keep FOLDER]

Every input is made from a seed, so a failure is found again by its number. An input fails if the reader raises anything
else, takes longer than 10 s, makes the process grow by 1 GB, or if an audit event shows that code ran: an import, a
compilation, a process, a socket, a file opened for writing. At the end the record is printed: inputs by kind and
outcome, the worst time, the peak of memory.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import pickle
import random
import resource
import struct
import sys
import tempfile
import time
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from export.checkpoints.pickles.torch_zip import open_torch_zip, read_bare_pickle
from export.checkpoints.plain import huggingface, torch_file
from export.errors import CheckpointError

LIMIT_S = 10.0
LIMIT_BYTES = 10**9

DATA_OPCODES = (
    b"\x80\x95(012NKMJGXTUBC]}()tlaesuqrhjcRbQi\x81\x85\x86\x87\x88\x89\x8a\x8c\x8d\x8e\x8f\x90\x91\x92\x93\x94\x96."
)
GLOBALS = (
    *(
        b"os\nsystem",
        b"builtins\neval",
        b"__builtin__\ngetattr",
        b"subprocess\nPopen",
        b"commands\nPopen",
        b"torch\nload",
    ),
    *(b"collections\nOrderedDict", b"torch._utils\n_rebuild_tensor_v2", b"torch\nFloatStorage", b"torch\nSize"),
    *(b"torch._tensor\n_rebuild_from_type_v2", b"_codecs\nencode", b"argparse\nNamespace", b"__main__\nThing"),
    *(b"torch._utils\n_rebuild_tensor_v3", b"torch\nfloat32", b"torch\nUntypedStorage", b"functools\npartial"),
)
EXTREMES = (0, 1, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, (1 << 63) - 1, (1 << 64) - 1)

# Audit events that mean code ran or something was changed (docs.python.org, "Audit events table").
_FORBIDDEN = ("compile", "exec", "import", "os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen")
_FORBIDDEN += ("socket.connect", "shutil.rmtree", "os.remove", "os.rename", "ctypes.dlopen", "pickle.find_class")


@dataclass
class Record:
    """What happened so far."""

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    worst_s: float = 0.0
    worst: str = ""
    events: list[str] = field(default_factory=list)
    listening: bool = False
    # Of the process, with torch and the test runner in it, before the first input.
    before_bytes: int = 0

    def listen(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.listening:
            return
        writes = event == "open" and isinstance(args[1], str) and any(letter in args[1] for letter in "wax+")
        if writes or event in _FORBIDDEN:
            self.events.append(f"{event} {args[:2]!r}"[:200])


class Seeds:
    """Files as torch and safetensors write them, small, of every kind that the readers know."""

    def __init__(self, folder: Path) -> None:
        weight = torch.arange(12.0).reshape(3, 4)
        parameter = torch.nn.Parameter(weight.clone())
        parameter.note = "state"
        state = OrderedDict(a=weight, b=weight, c=weight.t(), d=torch.zeros(2, dtype=torch.bfloat16), e=parameter)
        contents = [
            state,
            {
                "module": state,
                "param_shapes": [OrderedDict(a=weight.shape)],
                "args": argparse.Namespace(x=1),
                "n": None,
            },
            {
                "optimizer_state_dict": {"state": {0: {"step": torch.tensor(3), "exp_avg": torch.ones(5)}}},
                "t": (1, 2.5),
            },
            {
                "model": {f"module.w{i}": torch.full((3,), float(i)) for i in range(6)},
                "s": {1, 2},
                "b": b"xyz",
                "i": 1 << 90,
            },
            torch.tensor(3, dtype=torch.uint16),
        ]
        self.files: list[bytes] = []
        for index, content in enumerate(contents):
            for protocol in (2, 4):
                path = folder / f"seed{index}.pt"
                torch.save(content, path, pickle_protocol=protocol)
                self.files.append(path.read_bytes())
        self.pickles = [self._read_pickle(data) for data in self.files]
        save_file({"a": weight, "b": torch.ones(2)}, folder / "seed.safetensors")
        self.safetensors = (folder / "seed.safetensors").read_bytes()

    @staticmethod
    def _read_pickle(data: bytes) -> tuple[bytes, dict[str, bytes]]:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
        return entries.pop("data.pkl"), entries


def build_archive(pickled: bytes, entries: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    """An archive with right checksums, so that the pickle is reached."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        archive.writestr("archive/data.pkl", pickled)
        for name, data in entries.items():
            archive.writestr(f"archive/{name}", data)
    return buffer.getvalue()


def flip_bytes(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        changed[rng.randrange(len(changed))] = rng.choice(
            (rng.randrange(256), changed[rng.randrange(len(changed))] ^ 1)
        )
    return bytes(changed)


def cut_or_grow(rng: random.Random, data: bytes) -> bytes:
    kind = rng.randrange(4)
    start, stop = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    if kind == 0:
        return data[:start]
    if kind == 1:
        return data[:start] + data[stop:]
    if kind == 2:
        return data[:stop] + data[start:]
    return data + rng.randbytes(rng.randint(1, 100))


def lie_in_directory(rng: random.Random, data: bytes) -> bytes:
    """Another number in one to three fields of the zip structures."""
    changed = bytearray(data)
    marks = [
        position
        for mark in (b"PK\1\2", b"PK\3\4", b"PK\5\6", b"PK\6\6", b"PK\6\7")
        for position in find_all(data, mark)
    ]
    for _ in range(rng.randint(1, 3)):
        position = rng.choice(marks) + rng.randint(4, 44)
        width = rng.choice((2, 4, 8))
        value = rng.choice((*EXTREMES, len(data), rng.randrange(len(data)))) & ((1 << 8 * width) - 1)
        changed[position : position + width] = value.to_bytes(width, "little")
    return bytes(changed[: len(data)])


def find_all(data: bytes, mark: bytes) -> list[int]:
    found, position = [], data.find(mark)
    while position >= 0:
        found.append(position)
        position = data.find(mark, position + 1)
    return found


def mutate_pickle(rng: random.Random, pickled: bytes) -> bytes:
    changed = bytearray(pickled)
    for _ in range(rng.randint(1, 6)):
        position = rng.randrange(len(changed))
        kind = rng.randrange(6)
        if kind == 0:
            changed[position] = rng.randrange(256)
        elif kind == 1:
            changed[position] = rng.choice(DATA_OPCODES)
        elif kind == 2:
            changed[position:position] = make_opcode(rng)
        elif kind == 3:
            del changed[position : position + rng.randint(1, 12)]
        elif kind == 4:
            stop = min(len(changed), position + rng.randint(1, 60))
            changed[position:position] = changed[position:stop] * rng.randint(1, 5)
        else:
            changed[position : position + 4] = struct.pack("<L", rng.choice(EXTREMES) & 0xFFFFFFFF)
        if not changed:
            return b"."
    return bytes(changed)


def make_opcode(rng: random.Random) -> bytes:
    """One opcode with an argument that may be right."""
    opcode = rng.choice(DATA_OPCODES)
    letter = bytes([opcode])
    if letter in b"ci":
        return letter + rng.choice(GLOBALS) + b"\n"
    if letter in b"KqhU\x8cC\x8a\x80":
        length = rng.randint(0, 9)
        return letter + bytes([length]) + (rng.randbytes(length) if letter in b"U\x8cC\x8a" else b"")
    if letter == b"M":
        return letter + rng.randbytes(2)
    if letter in b"JrjXTB":
        size = rng.choice((0, 3, rng.choice(EXTREMES) & 0xFFFFFFFF))
        return letter + struct.pack("<L", size) + b"abc"[: min(size, 3)]
    if letter in b"\x8d\x8e\x96\x95G":
        size = rng.choice((0, 3, rng.choice(EXTREMES)))
        return letter + struct.pack("<Q", size) + b"abc"[: min(size, 3)]
    return letter


def make_stream(rng: random.Random) -> bytes:
    """A pickle of random opcodes, a global and a call somewhere in it."""
    parts = [make_opcode(rng) for _ in range(rng.randint(1, 200))]
    for _ in range(rng.randint(0, 4)):
        parts.insert(
            rng.randrange(len(parts) + 1),
            b"c" + rng.choice(GLOBALS) + b"\n" + rng.choice((b")R", b")\x81", b"}b", b"")),
        )
    return b"\x80" + bytes([rng.choice((2, 4))]) + b"".join(parts) + b"."


def text(content: bytes) -> bytes:
    """A string as protocol 2 writes it."""
    return b"X" + struct.pack("<L", len(content)) + content


def make_nested(rng: random.Random) -> bytes:
    """Deep, wide or self-referring structures, up to the limits and beyond."""
    count = rng.choice((10, 1000, 100_000, 2_000_000))
    bodies: list[Callable[[], bytes]] = [
        lambda: b"N" + b"\x85" * count + b".",
        lambda: b"(" * min(count, 5000) + b"N" + b"t" * min(count, 5000) + b".",
        lambda: b"]q\x00" + b"h\x00a" * count + b".",
        lambda: b"]" * count + b"a" * (count - 1) + b".",
        lambda: b"}" + b"}q\x00" + b"K\x01h\x00s0h\x00" * count + b".",
        lambda: b"(" + b"\x8f" * count + b"t.",
        lambda: b"(" + b"}" * count + b"l.",
        lambda: b"\x8c\x01x" + b"q\x00h\x00\x86" * min(count, 1000) + b"}" + b"h\x00K\x01s.",
        lambda: (
            b"X\x10\x00\x00\x00"
            + b"a" * 16
            + b"q\x00"
            + b"0c_codecs\nencode\nh\x00X\x06\x00\x00\x00latin1\x86R" * (count // 20)
            + b"."
        ),
        lambda: b"ctorch\nSize\n(" + b"K\x01" * count + b"t\x85R.",
        lambda: b"\x8a\xff" + b"\x7f" * 255 + b"q\x00" + b"}" + b"h\x00Ns" * min(count, 100_000) + b".",
        lambda: (
            b"}("
            + b"".join(
                b"\x8a\x0b" + (index * ((1 << 61) - 1)).to_bytes(11, "little") + b"N"
                for index in range(min(count, 100_000))
            )
            + b"u."
        ),
        # One value that is long, and calls that each would copy it.
        lambda: (
            b"(" + b"N" * count + b"tq\x00ctorch._utils\n_rebuild_tensor_v2\nq\x01" + b"h\x01h\x00R0" * count + b"."
        ),
        lambda: (
            b"("
            + b"N" * count
            + b"tq\x00}K\x01K\x01sq\x01ctorch.nn\nModule\nq\x02"
            + b"h\x02h\x00h\x01\x92" * count
            + b"."
        ),
        lambda: text(b"a" * count) + b"q\x00" + text(b"B") + b"q\x01" + b"h\x00h\x01\x93" * count + b".",
        lambda: (
            text(b"a" * count)
            + b"q\x00c__builtin__\ngetattr\nq\x01ctorch.nn\nModule\nq\x02"
            + b"h\x01h\x02h\x00\x86Rq\x02" * count
            + b"."
        ),
        lambda: text(b"a" * count) + b"q\x00}(" + b"h\x00" * 40 + b"tNs.",
        lambda: b"}" + (text(b"a" * count) + b"q\x00Nsh\x00Ns") * 2 + b"h\x00Ns" * count + b".",
    ]
    return b"\x80\x02" + rng.choice(bodies)()


def make_bomb(rng: random.Random, seeds: Seeds) -> bytes:
    """Small files that promise to be large."""
    kind = rng.randrange(4)
    if kind == 0:
        return build_archive(b"\x80\x02N.", {"data/0": bytes(50_000_000)}, zipfile.ZIP_DEFLATED)
    if kind == 1:
        return build_archive(
            b"N" * 1_000_000, {}, rng.choice((zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA))
        )
    if kind == 2:
        # One entry that the directory names many times, each with the same bytes.
        data = bytearray(build_archive(b"\x80\x02N.", {"data/0": bytes(10_000)}))
        start, end = data.find(b"PK\1\2"), data.find(b"PK\5\6")
        last = bytes(data[data.rfind(b"PK\1\2") : end])
        count = rng.choice((10, 1000, 60_000))
        named = b"".join(last.replace(b"data/0", b"dat%03x" % (index % 4096)) for index in range(count))
        tail = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count & 0xFFFF, count & 0xFFFF, len(named), start, 0)
        return bytes(data[:start]) + named + tail
    data = bytearray(rng.choice(seeds.files))
    end = data.rfind(b"PK\5\6")
    struct.pack_into("<2H2L", data, end + 8, 0xFFFF, 0xFFFF, rng.choice(EXTREMES) & 0xFFFFFFFF, rng.randrange(end))
    return bytes(data)


def mutate_safetensors(rng: random.Random, data: bytes) -> bytes:
    length = int.from_bytes(data[:8], "little")
    kind = rng.randrange(4)
    if kind == 0:
        return flip_bytes(rng, data)
    if kind == 1:
        return struct.pack("<Q", rng.choice(EXTREMES)) + data[8:]
    if kind == 2:
        return cut_or_grow(rng, data)
    header = json.loads(data[8 : 8 + length])
    entry = header[rng.choice(("a", "b"))]
    entry[rng.choice(("shape", "data_offsets"))] = [rng.choice((*EXTREMES, -1)) for _ in range(rng.randint(0, 3))]
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


def make_input(number: int, seed: int, seeds: Seeds) -> tuple[str, str, bytes]:
    """Return kind, file name and content of input `number`."""
    rng = random.Random(f"{seed}/{number}")
    pickled, entries = rng.choice(seeds.pickles)
    # Few of the slow kinds: a pickle at the limit of steps takes a second.
    kind = rng.choices(
        ("flipped", "cut", "lying directory", "pickle", "stream", "nested", "bomb", "safetensors", "bare"),
        (20, 8, 25, 25, 12, 0.4, 0.4, 5, 4),
    )[0]
    if kind == "flipped":
        return kind, "x.pt", flip_bytes(rng, rng.choice(seeds.files))
    if kind == "cut":
        return kind, "x.pt", cut_or_grow(rng, rng.choice(seeds.files))
    if kind == "lying directory":
        return kind, "x.pt", lie_in_directory(rng, rng.choice(seeds.files))
    if kind == "pickle":
        return kind, "x.pt", build_archive(mutate_pickle(rng, pickled), entries)
    if kind == "stream":
        return kind, "x.pt", build_archive(make_stream(rng), entries)
    if kind == "nested":
        return kind, "x.pt", build_archive(make_nested(rng), entries)
    if kind == "bomb":
        return kind, "x.pt", make_bomb(rng, seeds)
    if kind == "safetensors":
        return kind, "model.safetensors", mutate_safetensors(rng, seeds.safetensors)
    return kind, ".metadata", rng.choice((make_stream(rng), mutate_pickle(rng, pickle.dumps({"a": (1, "x")}, 2))))


def read_input(path: Path) -> None:
    """Open a file as the readers would, and read every tensor of it."""
    if path.name == ".metadata":
        read_bare_pickle(path)
    elif path.suffix == ".safetensors":
        huggingface.open_folder(path.parent).verify()
    else:
        open_torch_zip(path)
        torch_file.open_file(path).verify()


def run(inputs: int, seed: int, folder: Path, *, keep: Path | None = None) -> Record:
    """Read `inputs` files made from `seed`; nothing is left in `folder`."""
    record = Record(before_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    seeds = Seeds(folder)
    # A hook cannot be taken away again: this one hears nothing but while an input is read.
    sys.addaudithook(record.listen)
    for data in seeds.files:
        # Whatever the readers import only when needed is imported now.
        path = folder / "x.pt"
        path.write_bytes(data)
        open_torch_zip(path)
        with contextlib.suppress(CheckpointError):
            read_input(path)
    for number in range(inputs):
        kind, name, content = make_input(number, seed, seeds)
        path = folder / name
        path.write_bytes(content)
        outcome, failure = read_timed(path, record)
        record.outcomes[(kind, outcome)] += 1
        if failure:
            record.failures.append(f"input {number} of seed {seed} ({kind}): {failure}")
            if keep is not None:
                (keep / f"{number}-{name}").write_bytes(content)
        path.unlink()
    return record


def read_timed(path: Path, record: Record) -> tuple[str, str]:
    """Return the outcome, and what is wrong with it or nothing."""
    record.events.clear()
    started = time.monotonic()
    failure = ""
    try:
        record.listening = True
        read_input(path)
        outcome = "read"
    except CheckpointError as exc:
        outcome = "refused"
        if "\n" in str(exc):
            failure = f"a message of several lines: {exc}"
    except BaseException as exc:
        outcome, failure = "crashed", f"{type(exc).__name__}: {exc}"
    finally:
        record.listening = False
    seconds = time.monotonic() - started
    if seconds > record.worst_s:
        record.worst_s, record.worst = seconds, f"{path.name}, {outcome}"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - record.before_bytes
    if seconds > LIMIT_S:
        failure = failure or f"took {seconds:.1f} s"
    if peak > LIMIT_BYTES:
        failure = failure or f"the process grew to {peak / 1e6:.0f} MB"
    if record.events:
        failure = failure or f"code ran: {record.events[0]}"
    return outcome, failure


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--inputs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="where to keep the inputs that fail")
    options = parser.parse_args()
    started = time.monotonic()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    with tempfile.TemporaryDirectory() as folder:
        record = run(options.inputs, options.seed, Path(folder), keep=options.keep)
    total = Counter[str]()
    for (kind, outcome), count in sorted(record.outcomes.items()):
        total[outcome] += count
        sys.stdout.write(f"{kind:16} {outcome:8} {count:7}\n")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    sys.stdout.write(
        f"{options.inputs} inputs, seed {options.seed}: {dict(total)}, {len(record.failures)} failures, "
        f"{time.monotonic() - started:.0f} s\n"
        f"worst time {record.worst_s:.2f} s ({record.worst}), peak RSS {peak:.0f} MB ({before:.0f} MB of it before)\n"
    )
    for failure in record.failures[:20]:
        sys.stdout.write(failure + "\n")
    return 1 if record.failures else 0


if __name__ == "__main__":
    sys.exit(main())
