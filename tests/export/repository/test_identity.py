"""An export that would lead to a version which is there is told from the hashes of its lock, without torch."""

import json
import os
import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from harness import Finished, fingerprint, run

from export import identity
from export.__main__ import main
from export.identity import SameVersion, find_same_version
from export.options import ExportRequest
from export.proof.report_page import PAGE_FILE
from export.repository.activation import activate
from export.repository.contents import find_active_version, list_versions
from export.repository.integrity import find_damage
from export.repository.lockfile import LOCK_FILE
from export.weights.vocabulary_options import AddedToken, VocabularyOptions

Exporting = Callable[..., Finished]

TOKENS = VocabularyOptions(added_tokens=(AddedToken(token="[NEW]"),))


@pytest.fixture(scope="module")
def template(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of a checkpoint and the repository that it was published in."""
    folder = tmp_path_factory.mktemp("published")
    shutil.copytree(tiny_checkpoint, folder / "checkpoint")
    assert main(["run", str(folder / "checkpoint"), "--name", "t", "--repository", str(folder / "models")]) == 0
    return folder


@pytest.fixture
def folder(template: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(template, tmp_path / "copy"))


@pytest.fixture
def request_(folder: Path) -> ExportRequest:
    return ExportRequest(checkpoint=folder / "checkpoint", name="t", repository=folder / "models")


def test_an_unchanged_export_is_told_before_torch_is_imported(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "poison").mkdir()
    (tmp_path / "poison" / "torch.py").write_text("raise SystemExit('torch was imported')\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "poison")}
    before = fingerprint(folder)
    command = ("-m", "export", "run", str(folder / "checkpoint"), "--name", "t", "--repository", str(folder / "models"))
    done = run(*command, env=environment)
    assert (done.code, done.err) == (0, "")
    assert "version 1 already holds exactly this; nothing was written (--again exports anyway)" in done.out
    told = json.loads(run(*command, "--json", env=environment).out)
    assert (told["publication"]["outcome"], told["publication"]["active"]) == ("unchanged", 1)
    assert told["report"]["passed"] is True
    # What was said when it was published.
    (warning,) = told["warnings"]
    assert warning.startswith("the pooling is a guess") and f"\nWarning: {warning}\n" in done.out
    assert fingerprint(folder) == before
    assert "torch was imported" in run(*command, "--again", env=environment).err


def test_the_page_of_a_published_version_says_what_was_verified(folder: Path) -> None:
    lock = json.loads((folder / "models" / "t" / "1" / LOCK_FILE).read_text())
    page = (folder / "models" / "t" / "1" / PAGE_FILE).read_text()
    digest = lock["sources"]["checkpoint"]["files"]["model.safetensors"]
    for text in ("Hugging Face safetensors, 1 file", f"{digest}, model.safetensors", "feature-extraction: ", " UTC"):
        assert text in page
    assert "<strong>Warning:</strong> <bdi>the pooling is a guess" in page
    assert "Since version" not in page


def edit(path: Path) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = bytearray((folder / path).read_bytes())
        content[-1] ^= 1
        (folder / path).write_bytes(content)

    return change


def add_pooling(folder: Path) -> None:
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    (folder / "checkpoint" / "modules.json").write_text(json.dumps(modules))
    (folder / "checkpoint" / "1_Pooling").mkdir()
    (folder / "checkpoint" / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')


@pytest.mark.parametrize(
    "change",
    [
        edit(Path("checkpoint/model.safetensors")),
        edit(Path("checkpoint/tokenizer.json")),
        add_pooling,
        edit(Path("models/t_model/1/model.onnx")),
        edit(Path("models/t/1/golden.json")),
        lambda folder: (folder / "models/t/1/SHA256SUMS").unlink(),
        lambda folder: (folder / "checkpoint/config.json").unlink(),
    ],
    ids=["weights", "tokenizer", "new file", "graph", "golden answers", "no sums", "no config"],
)
def test_any_other_byte_that_is_read_or_served_makes_it_another_export(
    change: Callable[[Path], None], folder: Path, request_: ExportRequest
) -> None:
    change(folder)
    assert find_same_version(request_) is None


def test_other_options_targets_and_code_make_it_another_export(
    request_: ExportRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in (
        replace(request_, target="25.08"),
        replace(request_, precision="fp16"),
        replace(request_, vocabulary=TOKENS),
        replace(request_, task_options={"pooling": "cls"}),
    ):
        assert find_same_version(other) is None
    assert find_same_version(request_) is not None
    monkeypatch.setattr(identity, "_hash_code", lambda: "0" * 16)
    assert find_same_version(request_) is None


def test_an_older_version_that_is_the_same_becomes_active_again(folder: Path, request_: ExportRequest) -> None:
    models = folder / "models"
    for part in models.iterdir():
        shutil.copytree(part / "1", part / "2")
    lock = models / "t" / "2" / LOCK_FILE
    lock.write_text(lock.read_text().replace('"precision": "fp32"', '"precision": "fp16"'))
    # They name the files of version 1.
    for record in ("SHA256SUMS", "publication.json"):
        (lock.parent / record).unlink()
    activate(models, "t", 2)
    same = find_same_version(request_)
    assert isinstance(same, SameVersion)
    assert (same.version.number, same.outcome) == (1, "switched")
    assert find_active_version(models, "t") == 1


@pytest.mark.parametrize(
    "words", [(), *(pytest.param((word,), marks=pytest.mark.rarer) for word in ("--no-activate", "--again"))]
)
def test_a_version_that_cannot_be_served_for_want_of_a_configuration_is_mended(
    words: tuple[str, ...], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repository = folder / "models"
    command = ["run", str(folder / "checkpoint"), "--name", "t", "--repository", str(repository), *words]
    before = {part: (repository / part / "config.pbtxt").read_text() for part in ("t", "t_model", "t_preprocess")}
    (repository / "t_model" / "config.pbtxt").write_text("garbage {")
    (repository / "t_preprocess" / "config.pbtxt").unlink()
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "is served again" in out and "nothing was written" not in out
    assert {part: (repository / part / "config.pbtxt").read_text() for part in before} == before
    assert list_versions(repository / "t") == [1]
    (repository / "t" / "config.pbtxt").write_text("garbage {")
    assert main(command) == 1
    told = capsys.readouterr().err
    assert told.startswith("error: ") and told.endswith("move this file out of the repository, then do it again.\n")
    (repository / "t" / "config.pbtxt").unlink()
    if words != ("--no-activate",):
        assert main(command) == 0
        assert {part: (repository / part / "config.pbtxt").read_text() for part in before} == before


@pytest.mark.rarer
def test_a_step_without_a_configuration_does_not_make_its_files_missing(folder: Path, export_cli: Exporting) -> None:
    (folder / "other").mkdir()
    repository, other = folder / "models", shutil.copytree(folder / "checkpoint", folder / "other" / "checkpoint")
    words = ("run", str(other), "--name", "t", "--repository", str(repository), "--no-activate", "--add-special-token")
    assert export_cli(*words, "[NEW]=new").code == 0
    (repository / "t_preprocess" / "config.pbtxt").unlink()
    again = export_cli(*words, "[NEW]=new")
    assert (again.code, again.err) == (0, "")
    assert "version 2 already holds exactly this" in again.out and "not this version but 1" in again.out
    assert [finding.what for finding in find_damage(repository)] == ["is missing"]
    assert main(shlex.split(again.out.splitlines()[-1].removeprefix("Next: python -m export "))) == 0
    assert list(find_damage(repository)) == []
