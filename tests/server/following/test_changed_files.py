"""Files of a served version that become others: what is loaded is what was published, and nothing answers otherwise."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from followed import NAME, PARTS, Callers, copy_at_first, publish_half, read_following, read_ready, wait_for
from launcher import Running, running

from export.repository.integrity import find_damaged_files
from export.repository.version import Version
from server.following.changes import Changes
from server.following.published import Published
from server.following.sums import FileSums, find_damaged_sums, hash_file, read_sums, select_loaded

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


def write_sum(sums: Path, path: Path) -> None:
    """Have the sums of a version name the bytes that a file of it has now."""
    lines = [line.split("  ") for line in sums.read_text().splitlines()]
    told = [(hash_file(path) if name.endswith(path.name) else digest, name) for digest, name in lines]
    put(sums, "".join(f"{digest}  {name}\n" for digest, name in told).encode())


def put_other_publication(repository: Path, other: Path, after_part: Callable[[], object] = lambda: None) -> None:
    """Copy what is version 2 over version 1, as whoever copies one over the other does: file by file."""
    shutil.copytree(repository, other)
    for part in PARTS:
        shutil.rmtree(other / part / "1")
        (other / part / "2").rename(other / part / "1")
    sums = other / NAME / "1" / "SHA256SUMS"
    put(sums, sums.read_bytes().replace(b"/2/", b"/1/"))
    for part in PARTS:
        shutil.copytree(other / part / "1", repository / part / "1", dirs_exist_ok=True)
        after_part()


def put(path: Path, content: bytes) -> None:
    """Put other bytes in the place of a file, as whoever copies one does."""
    staged = path.with_name("put")
    staged.write_bytes(content)
    staged.replace(path)


@pytest.mark.parametrize(
    "file", [f"{MODEL}/1/model.onnx", pytest.param(f"{PREPROCESS}/1/tokenizer.json", marks=pytest.mark.rarer)]
)
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


@pytest.mark.parametrize("told_by", ["sums", pytest.param("lock", marks=pytest.mark.rarer)])
def test_a_tokenizer_that_was_changed_before_the_start_is_not_served(
    repository: Path, tmp_path: Path, told_by: str
) -> None:
    copy = copy_at_first(repository, tmp_path / "models")
    half = publish_half(copy, tmp_path)
    if told_by == "lock":
        (copy / half / "1" / "SHA256SUMS").unlink()
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
        path.unlink()
        lost = {"sums": f"{path} is missing", "lock": f"{copy / half / '1'} lacks tokenizer.json"}[told_by]
        wait_for(server, lambda models: lost in models[half]["reason"])
        put(path, content)
        wait_for(server, lambda models: models[half]["state"] == "served")
        assert server.check().code == 0


def test_another_publication_of_a_served_number_is_served_whole_or_not_at_all(
    served: tuple[Running, Path], tmp_path: Path
) -> None:
    server, repository = served
    with Callers(server, repository) as callers:
        while not callers.answers:
            time.sleep(0.05)
        put_other_publication(
            repository, tmp_path / "other", lambda: [stub.kill() for stub in server.find_stubs(MODEL)[:1]]
        )
        server.wait_for_line("version 1 of followed is another publication than before", 60)
        # It is to be served all the while.
        wait_for(server, lambda models: read_ready(server) == (503, "not ready: none of 1 models is served\n"))
        wait_for(server, lambda models: (models[NAME]["state"], models[NAME]["served"]) == ("served", 1))
        before = callers.answers[2]
        while callers.answers[2] < before + 20:
            time.sleep(0.05)
    # By one or the other, and by no mixture of them.
    assert set(callers.answers) == {1, 2}
    assert server.check().code == 0


@pytest.mark.parametrize("takes", ["all", pytest.param("a line", marks=pytest.mark.rarer)])
def test_sums_that_are_taken_away_leave_those_that_it_was_loaded_with(served: tuple[Running, Path], takes: str) -> None:
    server, repository = served
    sums, graph = repository / NAME / "1" / "SHA256SUMS", repository / MODEL / "1" / "model.onnx"
    told, content = sums.read_bytes(), graph.read_bytes()
    sums.unlink()
    if takes == "a line":
        sums.write_bytes(b"".join(line for line in told.splitlines(keepends=True) if b"model.onnx" not in line))
    what = f"{sums} is missing" if takes == "all" else f"{sums} does not name model.onnx"
    wait_for(server, lambda models: what in models[NAME]["reason"] and models[NAME]["served"] == 1)
    put(graph, (repository / MODEL / "2" / "model.onnx").read_bytes())
    with Callers(server, repository) as callers:
        server.find_stubs(MODEL)[0].kill()
        server.wait_for_line(f"{MODEL}: cannot be loaded anew", 60)
        assert str(graph) in wait_for(server, lambda models: str(graph) in models[NAME]["reason"])[NAME]["reason"]
        put(graph, content)
        put(sums, told)
        server.wait_for_line(f"{MODEL}: answers again", 60)
        wait_for(server, lambda models: models[NAME]["state"] == "served")
    assert set(callers.answers) == {1}


def test_a_recorded_answer_that_is_changed_while_it_is_served_is_told(served: tuple[Running, Path]) -> None:
    server, repository = served
    golden = repository / NAME / "1" / "golden.json"
    content = golden.read_bytes()
    put(golden, (repository / NAME / "2" / "golden.json").read_bytes())
    wait_for(server, lambda models: str(golden) in models[NAME]["reason"] and models[NAME]["served"] == 1)
    # What is loaded has not changed, and is brought back.
    for stub in server.find_stubs(MODEL):
        stub.kill()
    server.wait_for_line(f"{MODEL}: answers again", 60)
    put(golden, content)
    wait_for(server, lambda models: models[NAME]["state"] == "served" and models[NAME]["served"] == 1)


def test_a_recorded_answer_that_is_changed_with_its_sum_is_told_and_restarts_no_container(
    served: tuple[Running, Path],
) -> None:
    server, repository = served
    golden, sums = repository / NAME / "1" / "golden.json", repository / NAME / "1" / "SHA256SUMS"
    content, told = golden.read_bytes(), sums.read_bytes()
    put(golden, (repository / NAME / "2" / "golden.json").read_bytes())
    write_sum(sums, golden)
    what = f"{golden} has changed since it was loaded"
    wait_for(server, lambda models: what in models[NAME]["reason"] and models[NAME]["served"] == 1)
    judged, lenient = server.check(), server.check("--any-version")
    assert judged.code == 1 and what in judged.err
    assert lenient.code == 0 and lenient.err.startswith("warning: ") and what in lenient.err
    put(golden, content)
    put(sums, told)
    wait_for(server, lambda models: models[NAME]["state"] == "served" and models[NAME]["served"] == 1)
    assert server.check().code == 0


def test_a_file_that_is_changed_with_its_sum_but_not_with_its_lock_replaces_nothing(
    served: tuple[Running, Path],
) -> None:
    server, repository = served
    graph, sums = repository / MODEL / "1" / "model.onnx", repository / NAME / "1" / "SHA256SUMS"
    content, told = graph.read_bytes(), sums.read_bytes()
    with Callers(server, repository) as callers:
        put(graph, (repository / MODEL / "2" / "model.onnx").read_bytes())
        write_sum(sums, graph)
        wait_for(server, lambda models: f"{graph} has changed since it was loaded" in models[NAME]["reason"])
        before = callers.answers[1]
        while callers.answers[1] < before + 20:
            time.sleep(0.05)
        put(graph, content)
        wait_for(server, lambda models: f"{sums} names other bytes for model.onnx" in models[NAME]["reason"])
        put(sums, told)
        wait_for(server, lambda models: models[NAME]["state"] == "served")
    assert set(callers.answers) == {1} and callers.failures == []
    assert server.check().code == 0


@pytest.mark.parametrize("damage", ["cut", pytest.param("a line", marks=pytest.mark.rarer)])
def test_a_model_whose_sums_lack_a_file_at_the_start_is_served_once_they_do_not(
    repository: Path, tmp_path: Path, damage: str
) -> None:
    copy = copy_at_first(repository, tmp_path / "models")
    half = publish_half(copy, tmp_path)
    sums = copy / half / "1" / "SHA256SUMS"
    told = sums.read_bytes()
    sums.unlink()
    if damage == "cut":
        sums.write_bytes(told[: len(told) * 15 // 100])
    else:
        sums.write_bytes(b"".join(line for line in told.splitlines(keepends=True) if b"model.onnx" not in line))
    with running(copy) as server:
        server.read_until("serving HTTP")
        server.follow()
        assert read_ready(server) == (200, "ready, 1 of 2 models\n")
        reason = read_following(server)[half]["reason"]
        assert str(sums) in reason and "restore it, or promote or export that version again" in reason
        checked = server.check()
        assert checked.code == 1 and str(sums) in checked.err
        put(sums, told)
        wait_for(server, lambda models: models[half]["state"] == "served")
        assert server.check().code == 0


@pytest.mark.parametrize("kept", ["lock", "nothing"])
@pytest.mark.rarer
def test_what_is_served_without_sums_is_guarded_and_takes_those_that_come(
    repository: Path, tmp_path: Path, kept: str
) -> None:
    copy = copy_at_first(repository, tmp_path / "models")
    sums, lock = (copy / NAME / "1" / name for name in ("SHA256SUMS", "modelyard.lock.json"))
    graph = copy / MODEL / "1" / "model.onnx"
    told, locked, content = sums.read_bytes(), lock.read_bytes(), graph.read_bytes()
    sums.unlink()
    if kept == "nothing":
        lock.unlink()
    with running(copy) as server:
        server.read_until("serving HTTP")
        server.follow()
        put(graph, (copy / MODEL / "2" / "model.onnx").read_bytes())
        what = f"{graph} has changed since it was "
        wait_for(server, lambda models: what in models[NAME]["reason"] and models[NAME]["served"] == 1)
        with Callers(server, copy) as callers:
            server.find_stubs(MODEL)[0].kill()
            server.wait_for_line(f"{MODEL}: cannot be loaded anew", 60)
            put(graph, content)
            server.wait_for_line(f"{MODEL}: answers again", 60)
            wait_for(server, lambda models: models[NAME]["state"] == "served")
        assert set(callers.answers) == {1}
        put(graph, (copy / MODEL / "2" / "model.onnx").read_bytes())
        wait_for(server, lambda models: what in models[NAME]["reason"])
        os.kill(server.tritonserver, signal.SIGKILL)
        server.wait_for_line("tritonserver answers again", 60)
        wait_for(server, lambda models: what in models[NAME]["reason"] and models[NAME]["served"] == 0)
        put(lock, locked)
        put(sums, told)
        put(graph, content)
        wait_for(server, lambda models: (models[NAME]["state"], models[NAME]["served"]) == ("served", 1))
        assert server.check().code == 0
        put_other_publication(copy, tmp_path / "other")
        server.wait_for_line("version 1 of followed is another publication than before", 60)
        wait_for(server, lambda models: (models[NAME]["state"], models[NAME]["served"]) == ("served", 1))
        assert server.check().code == 0


@pytest.mark.rarer
def test_a_file_that_was_another_while_it_was_loaded_is_loaded_once_more(repository: Path, tmp_path: Path) -> None:
    copy = copy_at_first(repository, tmp_path / "models")
    graph = copy / MODEL / "1" / "model.onnx"
    right, other = graph.read_bytes(), (copy / MODEL / "2" / "model.onnx").read_bytes()
    with running(copy) as server:
        server.read_until("serving HTTP")
        server.follow()
        # Once in the place of a process, once in a tritonserver that is started anew.
        for victim in (server.find_stubs(MODEL)[0].pid, server.tritonserver):
            os.kill(victim, signal.SIGKILL)
            # Right before it is loaded and right afterwards, as far as anybody looks.
            for content in (other, right) * 12:
                put(graph, content)
                time.sleep(0.15)
            wait_for(server, lambda models: models[NAME]["state"] == "served")
            assert server.check().code == 0


def test_what_a_program_keeps_for_itself_as_it_loads_a_version_is_no_change(version: Path) -> None:
    changes = Changes(version.parent.parent)
    (version.parent / "config.pbtxt").touch()
    served = [Published(name=version.parent.name, version=int(version.name), configs={version.parent.name: ""})]
    failed = {version.parent.name: 0}
    changes.find_mended(failed)
    before, before_served = changes.look([]), changes.look(served)
    for folder in (version, version / "package"):
        (folder / "__pycache__").mkdir(parents=True)
        (folder / "__pycache__" / "model.pyc").touch()
    (version / ".cache").touch()
    shutil.rmtree(version / "package")
    assert changes.look([]) == before and changes.look(served) == before_served
    assert not changes.find_mended(failed) and not changes.find_mended(failed)
    other = version / "other"
    for change in (other.touch, other.unlink, partial(version.chmod, 0o700)):
        change()
        assert changes.look([]) != before
        before = changes.look([])


def test_other_bytes_of_the_same_size_and_time_are_noticed(version: Path) -> None:
    sums, path = FileSums(), version / "tokenizer.json"
    assert sums.find_changed(read_sums(version)) == ""
    before = path.stat()
    path.write_text("[]")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    # A snapshot, for one, gives it another name.
    os.link(path, version.parent / "snapshot")
    assert sums.find_changed(read_sums(version)) == f"{path} has changed since it was published"
    path.write_text("{}")
    assert sums.find_changed(read_sums(version)) == ""


def test_a_file_that_was_another_for_a_moment_was_touched(version: Path) -> None:
    sums, path = FileSums(), version / "tokenizer.json"
    told = read_sums(version)
    assert sums.find_changed(told) == ""
    marks = sums.mark(told)
    assert path in marks
    assert sums.find_touched(marks) == ""
    path.rename(version / "away")
    path.write_text("[]")
    (version / "away").replace(path)
    assert sums.find_touched(marks) == f"{path} was touched while it was loaded"
    assert sums.find_changed(told) == ""
    assert sums.find_touched(sums.mark(told)) == ""


def test_a_file_that_is_given_another_name_or_loses_one_was_not_touched(version: Path) -> None:
    """As a publication, or its removal, does with files that it has in common with the version that is loaded."""
    sums, path = FileSums(), version / "tokenizer.json"
    told = read_sums(version)
    assert sums.find_changed(told) == ""
    marks = sums.mark(told)
    os.link(path, version.parent / "another")
    assert sums.find_touched(marks) == ""
    assert sums.find_changed(told) == ""
    marks = sums.mark(told)
    (version.parent / "another").unlink()
    assert sums.find_touched(marks) == ""
    # Written to under either name it is another.
    os.link(path, version.parent / "another")
    (version.parent / "another").write_text("[]")
    assert sums.find_touched(marks) == f"{path} was touched while it was loaded"


def test_a_large_file_is_what_was_published_until_it_is_touched(version: Path) -> None:
    sums, path = FileSums(), version / "model.onnx"
    with path.open("wb") as file:
        file.truncate(65 * 2**20)
    told = {path: "0" * 64}
    assert sums.find_changed(told) == ""
    os.utime(path)
    assert sums.find_changed(told) == f"{path} has changed since it was published"
    assert sums.find_changed({path: hash_file(path)}) == ""


def test_what_is_written_about_a_version_is_no_part_of_what_is_loaded(version: Path) -> None:
    names = ["../../tiny_model/1/model.onnx", "lean.json", "verification.html", "golden.json", "configs/tiny.pbtxt"]
    (version / "SHA256SUMS").write_text("".join(f"{'0' * 64}  {name}\n" for name in names))
    models = version.parents[1]
    assert {*select_loaded(version, read_sums(version))} == {models / "tiny_model/1/model.onnx", version / "lean.json"}


@pytest.mark.parametrize("form", ["{digest}  {name}\n", "{digest} *{name}\r\n", "\n{digest}  {name}\nffff  cut"])
def test_sums_are_read_as_sha256sum_reads_them(version: Path, form: str) -> None:
    digest = hash_file(version / "tokenizer.json")
    (version / "SHA256SUMS").write_bytes(form.format(digest=digest.upper(), name="tokenizer.json").encode())
    assert read_sums(version) == {version / "tokenizer.json": digest}


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda told: told, ""),
        (lambda told: told.replace(b"\n", b"\r\n"), ""),
        (lambda told: told + told.split(b"\n")[0] + b"\n", ""),
        (lambda told: told[: len(told) // 2 + 1], "is cut or damaged"),
        (lambda told: told + b"junk\n", "is cut or damaged"),
        (lambda told: b"", "is cut or damaged"),
        (lambda told: told.split(b"\n", 1)[1], "does not name model.onnx"),
        (lambda told: told.rsplit(b"\n", 2)[0] + b"\n", "does not name "),
        (lambda told: b"0" * 64 + told[64:], "names other bytes for model.onnx"),
    ],
)
def test_sums_are_whole_to_the_server_where_they_are_to_the_exporter(
    repository: Path, tmp_path: Path, damage: Callable[[bytes], bytes], what: str
) -> None:
    copy = copy_at_first(repository, tmp_path / "models")
    sums = copy / NAME / "1" / "SHA256SUMS"
    put(sums, damage(sums.read_bytes()))
    told = find_damaged_sums(sums.parent)
    assert (what in told) if what else told == ""
    assert bool(what) == bool([*find_damaged_files(Version(repository=copy, name=NAME, number=1))])


def test_sums_are_those_of_where_a_link_leads(version: Path, tmp_path: Path) -> None:
    """`link/..` is the folder above what it leads to, not the one that the link lies in."""
    (tmp_path / "models" / "deep").mkdir()
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (elsewhere / "link").symlink_to(tmp_path / "models" / "deep")
    linked = elsewhere / "link" / ".." / "tiny" / "1"
    (version / "SHA256SUMS").write_text(f"{'0' * 64}  ../1/tokenizer.json\n")
    assert read_sums(linked) == {linked / "tokenizer.json": "0" * 64}
    changed = FileSums().find_changed(read_sums(linked), linked)
    assert changed == f"{linked / 'tokenizer.json'} has changed since it was published"
    assert {*select_loaded(linked, read_sums(linked))} == {linked / "tokenizer.json"}
