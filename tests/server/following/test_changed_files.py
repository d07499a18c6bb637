"""Files of a served version that become others: what is loaded is what was published, and nothing answers otherwise."""

import json
import os
import signal
from pathlib import Path

import pytest
from followed import NAME, PARTS, Callers, copy_at_first, publish_half, read_following, read_ready, wait_for
from launcher import Running, running

from server.following.sums import FileSums, hash_file

PREPROCESS, MODEL, _ = PARTS


@pytest.fixture
def version(tmp_path: Path) -> Path:
    """Return a folder of a version with one file, and its sum."""
    folder = tmp_path / "models" / "tiny" / "1"
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text("{}")
    write_sums(folder)
    return folder


def write_sums(version: Path) -> None:
    files = [path for path in sorted(version.iterdir()) if path.name != "SHA256SUMS"]
    (version / "SHA256SUMS").write_text("".join(f"{hash_file(path)}  {path.name}\n" for path in files))


def put(path: Path, content: bytes) -> None:
    """Put other bytes in the place of a file, as whoever copies one does."""
    staged = path.with_name("put")
    staged.write_bytes(content)
    staged.replace(path)


@pytest.mark.parametrize("file", [f"{MODEL}/1/model.onnx", f"{PREPROCESS}/1/tokenizer.json"])
def test_what_was_put_in_the_place_of_a_served_file_is_told_and_loaded_by_nobody(
    served: tuple[Running, Path], file: str
) -> None:
    server, repository = served
    path = repository / file
    content = path.read_bytes()
    other = (repository / f"{MODEL}/2/model.onnx").read_bytes()
    put(path, other if path.suffix == ".onnx" else content.replace(b'"the":', b'"\x01":').replace(b'"of":', b'"the":'))
    told = wait_for(server, lambda models: models[NAME]["state"] == "failed")[NAME]
    assert f"{path} has changed since it was published" in told["reason"]
    assert told["served"] == 1 and "version 1 of followed is served as before" in told["reason"]
    part = path.parents[1].name
    with Callers(server, repository) as callers:
        server.find_stubs(part)[0].kill()
        server.wait_for_line(f"{part}: cannot be loaded anew", 60)
        assert server.check().code == 1
        # What is left of it is asked for, and a container is not restarted.
        assert server.check("--any-version").code == 0
        put(path, content)
        server.wait_for_line(f"{part}: answers again", 60)
        wait_for(server, lambda models: models[NAME]["state"] == "served")
    assert set(callers.answers) == {1}
    assert server.check().code == 0


def test_a_tritonserver_that_is_started_anew_does_not_load_what_was_changed_meanwhile(
    served: tuple[Running, Path],
) -> None:
    server, repository = served
    graphs = [repository / MODEL / str(version) / "model.onnx" for version in (1, 2)]
    content = graphs[0].read_bytes()
    put(graphs[0], graphs[1].read_bytes())
    wait_for(server, lambda models: models[NAME]["state"] == "failed")
    os.kill(server.tritonserver, signal.SIGKILL)
    wait_for(server, lambda models: models[NAME]["served"] == 0)
    server.wait_for_line("tritonserver answers again", 60)
    with Callers(server, repository) as callers:
        assert read_ready(server)[0] == 503
        put(graphs[0], content)
        wait_for(server, lambda models: models[NAME]["state"] == "served" and models[NAME]["served"] == 1)
    assert set(callers.answers) == {1}
    assert server.check().code == 0


def test_a_file_that_is_cut_where_it_lies_is_told_before_anything_dies_of_it(served: tuple[Running, Path]) -> None:
    server, repository = served
    graph = repository / MODEL / "1" / "model.onnx"
    content = graph.read_bytes()
    os.truncate(graph, 5000)
    wait_for(server, lambda models: str(graph) in models[NAME]["reason"])
    graph.write_bytes(content)
    wait_for(server, lambda models: models[NAME]["state"] == "served")
    assert server.check().code == 0


def test_a_tokenizer_that_was_changed_before_the_start_is_not_served(repository: Path, tmp_path: Path) -> None:
    copy = copy_at_first(repository, tmp_path / "models")
    half = publish_half(copy, tmp_path)
    path = copy / f"{half}_preprocess" / "1" / "tokenizer.json"
    content = path.read_bytes()
    tokenizer = json.loads(content)
    vocabulary = tokenizer["model"]["vocab"]
    # Of what the recorded answer is asked with, neither is a part.
    vocabulary["b"], vocabulary["c"] = vocabulary["c"], vocabulary["b"]
    put(path, json.dumps(tokenizer).encode())
    with running(copy) as server:
        server.read_until("serving HTTP")
        server.follow()
        assert read_ready(server) == (200, "ready, 1 of 2 models\n")
        assert f"{path} has changed since it was published" in read_following(server)[half]["reason"]
        checked = server.check()
        assert checked.code == 1 and str(path) in checked.err
        put(path, content)
        wait_for(server, lambda models: models[half]["state"] == "served")
        assert server.check().code == 0


def test_other_bytes_of_the_same_size_and_time_are_noticed(version: Path) -> None:
    sums, path = FileSums(), version / "tokenizer.json"
    assert sums.find_changed(version) == ""
    before = path.stat()
    path.write_text("[]")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert sums.find_changed(version) == f"{path} has changed since it was published"
    path.write_text("{}")
    assert sums.find_changed(version) == ""


def test_a_large_file_is_what_was_published_until_it_is_touched(version: Path) -> None:
    sums, path = FileSums(), version / "model.onnx"
    with path.open("wb") as file:
        file.truncate(65 * 2**20)
    write_sums(version)
    lines = (version / "SHA256SUMS").read_text()
    (version / "SHA256SUMS").write_text(lines.replace(hash_file(path), "0" * 64))
    assert sums.find_changed(version) == ""
    # Another version that shares its bytes has a name for them as well.
    os.link(path, version.parent / "shared")
    assert sums.find_changed(version) == ""
    os.truncate(path, 66 * 2**20)
    assert str(path) in sums.find_changed(version)


def test_what_is_written_about_a_version_is_no_part_of_what_is_loaded(version: Path) -> None:
    (version / "configs").mkdir()
    for name in ("verification.html", "configs/tiny.pbtxt"):
        (version / name).write_text("as published")
    sums = "".join(f"{'0' * 64}  {name}\n" for name in ("verification.html", "golden.json", "configs/tiny.pbtxt"))
    (version / "SHA256SUMS").write_text(sums)
    assert FileSums().find_changed(version) == ""
    # Of a line that was cut nothing is known.
    (version / "SHA256SUMS").write_text(f"{'0' * 64}  tokenizer.json")
    assert FileSums().find_changed(version) == ""
