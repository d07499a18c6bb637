"""Files that are read as a model answers: what is written into them is found, whatever their names name by then."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from server.following.mapped import MappedFiles
from server.following.published import Loaded, Published
from server.following.sums import hash_file

READER = """
import mmap, sys, time
with open(sys.argv[1], "rb") as file:
    memory = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ)
print("mapped", flush=True)
time.sleep(60)
"""


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "models of others" / "tiny" / "1" / "model.onnx.data"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"right" * 1000)
    return path


@pytest.fixture
def reader(weights: Path) -> Iterator[subprocess.Popen[str]]:
    """A process of this one's that has the weights in its memory, as a model's is of tritonserver's."""
    with start_reader(weights) as process:
        yield process
        process.kill()


def start_reader(weights: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", READER, weights], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "mapped\n"
    return process


def load(weights: Path) -> Loaded:
    published = Published(name="tiny", version=1, configs={"tiny": ""})
    return Loaded(published=published, files={weights: hash_file(weights)}, asked={})


def write(path: Path, content: bytes) -> None:
    """Write into a file as it lies there, with another time of the last change."""
    time.sleep(0.02)
    with path.open("r+b") as file:
        file.write(content)


def look(mapped: MappedFiles, loaded: Loaded) -> object:
    """Look until what was written has been read."""
    for _ in range(10):
        found = mapped.look([loaded], os.getpid())
        time.sleep(0.02)
    return found


def leave(path: Path) -> None:
    """Leave the file as it is."""


def put_right_file(path: Path) -> None:
    """Put the right file in the place of the other."""
    right = path.with_name("put")
    right.write_bytes(b"right" * 1000)
    right.replace(path)


@pytest.mark.parametrize("then", [leave, put_right_file, Path.unlink], ids=lambda then: then.__name__)
def test_what_is_written_over_is_found_whatever_lies_in_its_place(
    weights: Path, reader: subprocess.Popen[str], then: Callable[[Path], object]
) -> None:
    mapped, loaded = MappedFiles(), load(weights)
    assert look(mapped, loaded) == {}
    write(weights, b"other")
    then(weights)
    assert look(mapped, loaded) == {"tiny": weights}
    assert mapped.end_readers(weights, os.getpid())
    assert reader.wait(10) < 0
    assert look(mapped, loaded) == {}
    assert not mapped.end_readers(weights, os.getpid())


def test_what_was_moved_aside_is_watched_for_as_long_as_it_is_read(
    weights: Path, reader: subprocess.Popen[str]
) -> None:
    mapped, loaded = MappedFiles(), load(weights)
    assert look(mapped, loaded) == {}
    aside = weights.with_name("aside")
    weights.rename(aside)
    put_right_file(weights)
    assert look(mapped, loaded) == {}
    write(aside, b"other")
    assert look(mapped, loaded) == {"tiny": weights}


def test_who_touches_a_file_changes_nothing(weights: Path, reader: subprocess.Popen[str]) -> None:
    mapped, loaded = MappedFiles(), load(weights)
    assert look(mapped, loaded) == {}
    weights.touch()
    weights.chmod(0o600)
    write(weights, b"right")
    assert look(mapped, loaded) == {}
    write(weights, b"other")
    assert look(mapped, loaded) == {"tiny": weights}
    write(weights, b"right")
    assert look(mapped, loaded) == {}


def test_what_nobody_reads_may_become_another(weights: Path) -> None:
    mapped, loaded = MappedFiles(), load(weights)
    assert look(mapped, loaded) == {}
    descriptors = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    write(weights, b"other")
    put_right_file(weights)
    assert look(mapped, loaded) == {}
    assert len(os.listdir("/proc/self/fd")) == descriptors  # noqa: PTH208


def test_what_is_written_over_while_it_is_loaded_is_found_once_it_is_read(weights: Path) -> None:
    mapped, loaded = MappedFiles(), load(weights)
    mapped.open(loaded)
    write(weights, b"other")
    assert look(mapped, loaded) == {}
    with start_reader(weights) as process:
        assert look(mapped, loaded) == {"tiny": weights}
        process.kill()


def test_what_was_written_over_is_right_for_what_is_loaded_from_it_then(
    weights: Path, reader: subprocess.Popen[str]
) -> None:
    mapped, loaded = MappedFiles(), load(weights)
    assert look(mapped, loaded) == {}
    write(weights, b"other")
    assert look(mapped, loaded) == {"tiny": weights}
    # Another publication has been copied over the first, and is read by the same name at the same place.
    other = load(weights)
    mapped.open(other)
    assert look(mapped, other) == {}
    write(weights, b"wrong")
    assert look(mapped, other) == {"tiny": weights}


def test_what_another_model_reads_by_another_name_is_not_taken_for_a_reader(weights: Path, tmp_path: Path) -> None:
    stub = tmp_path / "triton_python_backend_stub"
    stub.symlink_to(sys.executable)
    other = tmp_path / "shown" / "other" / "1" / "model.onnx.data"
    other.parent.mkdir(parents=True)
    os.link(weights, other)
    program = tmp_path / "shown" / "{}" / "1" / "model.py"
    mapped, loaded = MappedFiles(), load(weights)
    with contextlib.ExitStack() as stack:

        def start(model: str, path: Path) -> subprocess.Popen[str]:
            script = Path(str(program).format(model))
            script.parent.mkdir(parents=True, exist_ok=True)
            script.write_text(READER.replace("sys.argv[1]", repr(str(path))))
            process = stack.enter_context(subprocess.Popen([stub, script], stdout=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            assert process.stdout is not None and process.stdout.readline() == "mapped\n"
            return process

        start("other", other)
        assert look(mapped, loaded) == {}
        write(other, b"other")
        # Nobody reads it for this model, whose file it is as well.
        assert look(mapped, loaded) == {}
        mine = start("tiny.candidate", weights)
        assert look(mapped, loaded) == {"tiny": weights}
        assert mapped.end_readers(weights, os.getpid())
        assert mine.wait(10) < 0
