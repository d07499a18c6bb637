import hashlib
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from export.errors import CheckpointError, RepositoryError
from export.repository.lockfile import LOCK_FILE, SourceHash, build_lock, hash_source, read_lock, render_lock
from export.targets import DEFAULT_TARGET, find_target


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder of three files, one of them three mebibytes and a bit."""
    folder = tmp_path / "checkpoint"
    (folder / "rank").mkdir(parents=True)
    (folder / "weights.bin").write_bytes(bytes(range(256)) * 4096 * 3 + b"tail")
    (folder / "config.json").write_text("{}")
    (folder / "rank" / "Grüße 0.pt").write_bytes(b"")
    return folder


def build(source: SourceHash, **changes: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "target": DEFAULT_TARGET,
        "versions": {"torch": "2.13.0", "python": "3.11.7"},
        "sources": {"checkpoint": source},
        "options": {"task": None, "adapters": (Path("/home/me/adapter"),), "top_k": 2, "labels": {"b", "a"}},
        "seeds": {"random rows": 0},
        "artefacts": {"model.onnx": "0" * 64},
    }
    return build_lock(**(plain | changes))


def test_a_source_is_hashed_as_sha256sum_does(source: Path) -> None:
    told: list[tuple[int, int]] = []
    found = hash_source(source, on_progress=lambda done, total: told.append((done, total)))
    assert list(found.files) == ["config.json", "rank/Grüße 0.pt", "weights.bin"]
    expected = subprocess.run(["sha256sum", *found.files], cwd=source, capture_output=True, check=True).stdout
    assert expected.decode() == "".join(f"{value}  {name}\n" for name, value in found.files.items())
    assert found.sha256 == hashlib.sha256(expected).hexdigest()
    size = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
    assert told[-1] == (size, size)
    assert told == sorted(told)
    assert len(told) == 5


def test_only_the_named_files_are_hashed_in_whatever_order(source: Path) -> None:
    paths = [source / "weights.bin", source / "config.json"]
    assert hash_source(source, paths) == hash_source(source, reversed(paths))
    assert list(hash_source(source, paths).files) == ["config.json", "weights.bin"]


def test_every_byte_and_every_name_changes_the_hash(source: Path) -> None:
    before = hash_source(source)
    (source / "config.json").write_text("{ }")
    other = hash_source(source)
    (source / "config.json").write_text("{}")
    (source / "config.json").rename(source / "settings.json")
    assert len({before.sha256, other.sha256, hash_source(source).sha256}) == 3


def test_a_file_that_is_gone_is_refused(source: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        hash_source(source, [source / "gone.bin"])
    assert str(caught.value) == (
        f"the files of {source} cannot be hashed: got [Errno 2] No such file or directory: '{source}/gone.bin'; "
        "copy the checkpoint again."
    )


def test_the_same_inputs_give_the_same_bytes_wherever_they_lie(source: Path, tmp_path: Path) -> None:
    first = render_lock(build(hash_source(source)))
    copied = shutil.copytree(source, tmp_path / "elsewhere" / "copy")
    changes = {
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "options": {"labels": {"a", "b"}, "top_k": 2, "adapters": [Path("/srv/adapter")], "task": None},
    }
    assert render_lock(build(hash_source(copied), **changes)) == first
    assert str(tmp_path) not in first
    assert "/home/me" not in first
    assert first.endswith("}\n")


@pytest.mark.parametrize(
    "change",
    [
        {"target": find_target("25.08")},
        {"versions": {"torch": "2.13.1", "python": "3.11.7"}},
        {"sources": {}},
        {"options": {}},
        {"seeds": {"random rows": 1}},
        {"artefacts": {"model.onnx": "1" * 64}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_anything_else_gives_other_bytes(source: Path, change: dict[str, Any]) -> None:
    found = hash_source(source)
    assert render_lock(build(found, **change)) != render_lock(build(found))


def test_a_lock_is_read_back_as_it_was_written(source: Path, tmp_path: Path) -> None:
    path = tmp_path / LOCK_FILE
    path.write_text(render_lock(build(hash_source(source))), encoding="utf-8")
    lock = read_lock(path)
    assert render_lock(lock) == path.read_text(encoding="utf-8")
    assert lock["target"]["onnxruntime_version"] == "1.19.2"
    assert lock["options"] == {"task": None, "adapters": ["adapter"], "top_k": 2, "labels": ["a", "b"]}
    assert "rank/Grüße 0.pt" in lock["sources"]["checkpoint"]["files"]


def test_what_is_no_lock_is_refused(source: Path, tmp_path: Path) -> None:
    path = tmp_path / LOCK_FILE
    expected = "expected lock_version 1 with artefacts, options, seeds, sources, target, versions"
    newer = build(hash_source(source)) | {"lock_version": 2}
    for content, sentence in (
        ("{", f"{path} cannot be read: expected a lock, got Expecting property name"),
        ("[]", f"{path} is not a lock that this modelyard can read: {expected}, got none of it; export again."),
        ('{"a": 1}', f"{path} is not a lock that this modelyard can read: {expected}, got a; export again."),
        (
            json.dumps(newer),
            f"{path} is not a lock that this modelyard can read: {expected}, got lock_version 2; export",
        ),
    ):
        path.write_text(content)
        with pytest.raises(RepositoryError) as caught:
            read_lock(path)
        assert str(caught.value).startswith(sentence)
    with pytest.raises(RepositoryError, match="No such file"):
        read_lock(tmp_path / "gone.json")


@pytest.mark.parametrize(
    ("section", "content"),
    [("versions", []), ("versions", {"torch": [2]}), ("sources", {"checkpoint": {"files": [], "sha256": ""}})],
)
def test_a_lock_that_was_changed_by_hand_is_refused(source: Path, tmp_path: Path, section: str, content: Any) -> None:
    path = tmp_path / LOCK_FILE
    path.write_text(json.dumps(build(hash_source(source)) | {section: content}))
    with pytest.raises(RepositoryError, match=f"is damaged: expected what a lock records under {section}, got"):
        read_lock(path)
    path.write_text("[" * 100_000)
    with pytest.raises(RepositoryError, match="cannot be read: expected a lock, got"):
        read_lock(path)
