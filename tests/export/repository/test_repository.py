import fcntl
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from harness import Exported, fingerprint
from launcher import write_older_golden
from repositories import NAMES, is_consistent, make_other, publish_files, read_config, served

from demo.serving import serve
from export.engines.table import ONNXRUNTIME
from export.errors import RepositoryError
from export.repository.config_file import parse_config, render_config
from export.repository.contents import check_owners, find_owner
from export.repository.lock import check_destination
from export.repository.names import OWNER_PARAMETER, ModelNames, check_name
from export.repository.publication import check_contract
from export.signature import ModelSignature


@pytest.fixture
def other(exported: Exported, tmp_path: Path) -> Exported:
    return make_other(exported, tmp_path / "other")


def test_a_first_publication_makes_version_1_of_every_model(exported: Exported, tmp_path: Path) -> None:
    publication = publish_files(exported, tmp_path / "models")
    assert (publication.version, publication.outcome) == (1, "created")
    assert sorted(path for path, kind in fingerprint(tmp_path / "models").items() if kind != "folder") == [
        "sentence_embedding/1/SHA256SUMS",
        "sentence_embedding/1/configs/sentence_embedding.pbtxt",
        "sentence_embedding/1/configs/sentence_embedding_model.pbtxt",
        "sentence_embedding/1/configs/sentence_embedding_preprocess.pbtxt",
        "sentence_embedding/1/golden.json",
        "sentence_embedding/1/verification.json",
        "sentence_embedding/config.pbtxt",
        "sentence_embedding_model/1/model.onnx",
        "sentence_embedding_model/config.pbtxt",
        "sentence_embedding_preprocess/1/tokenizer.json",
        "sentence_embedding_preprocess/config.pbtxt",
    ]
    report = json.loads(publication.report_file.read_text())
    assert report["passed"] is True
    assert report["sha256"]["model.onnx"] == exported.report.sha256["model.onnx"]


def test_the_same_content_again_writes_nothing(exported: Exported, tmp_path: Path) -> None:
    publish_files(exported, tmp_path)
    before = fingerprint(tmp_path)
    assert publish_files(exported, tmp_path).outcome == "unchanged"
    assert fingerprint(tmp_path) == before


def test_exporting_again_mends_golden_answers_that_an_older_modelyard_wrote(exported: Exported, tmp_path: Path) -> None:
    publish_files(exported, tmp_path)
    golden = tmp_path / "sentence_embedding" / "1" / "golden.json"
    new = golden.read_bytes()
    write_older_golden(golden)
    publication = publish_files(exported, tmp_path)
    assert (publication.version, publication.outcome) == (2, "created")
    assert publication.report_file.with_name("golden.json").read_bytes() == new


def test_other_content_becomes_the_next_version_and_every_step_is_pinned(
    exported: Exported, other: Exported, tmp_path: Path
) -> None:
    publish_files(exported, tmp_path / "models")
    publication = publish_files(other, tmp_path / "models")
    assert (publication.version, publication.outcome) == (2, "created")
    steps = read_config(tmp_path / "models", "sentence_embedding").ensemble_scheduling.step
    assert [step.model_version for step in steps] == [2, 2]
    assert all(served(tmp_path / "models", name) == [2] for name in NAMES.all)
    assert (tmp_path / "models" / "sentence_embedding_model" / "1" / "model.onnx").is_file(), "the old version stays"


def test_content_that_an_older_config_turned_away_from_is_switched_to(
    exported: Exported, other: Exported, tmp_path: Path
) -> None:
    repository = tmp_path / "models"
    publish_files(exported, repository)
    old = {name: (repository / name / "config.pbtxt").read_bytes() for name in NAMES.all}
    publish_files(other, repository)
    for name, content in old.items():
        (repository / name / "config.pbtxt").write_bytes(content)
    publication = publish_files(other, repository)
    assert (publication.version, publication.outcome) == (2, "switched")
    assert served(repository, "sentence_embedding_model") == [2]


def test_files_that_the_report_does_not_name_are_refused(exported: Exported, other: Exported, tmp_path: Path) -> None:
    with pytest.raises(
        RepositoryError, match=r"the report is of other files: .* got changed, missing or new: model\.onnx"
    ):
        publish_files(exported, tmp_path / "models", files=other.files)
    with pytest.raises(RepositoryError, match="the report is of other files"):
        publish_files(exported, tmp_path / "models", files=replace(exported.files, model=()))
    assert not (tmp_path / "models").exists()


def test_a_report_that_failed_publishes_nothing(exported: Exported, tmp_path: Path) -> None:
    failed = replace(exported.report.cases[0], errors={"max_abs_error": 2e-5}, passed=False)
    with pytest.raises(RepositoryError, match="a model that failed its verification is not published"):
        publish_files(exported, tmp_path / "models", report=replace(exported.report, cases=[failed]))
    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "../up", "-x", "a b", "ü", "x" * 201, "a\n"])
def test_a_name_that_cannot_be_a_models_is_refused(name: str) -> None:
    with pytest.raises(RepositoryError, match="the model's name cannot be used"):
        check_name(name)


def test_a_name_keeps_its_contract(exported: Exported, tmp_path: Path) -> None:
    publish_files(exported, tmp_path)
    signature = exported.source.task.signature
    wider = replace(signature, outputs=(replace(signature.outputs[0], dims=("batch", 32)),))
    with pytest.raises(RepositoryError, match=r"already published with another contract: .*\[16\].*got.*\[32\]"):
        check_contract(tmp_path, NAMES, wider, ONNXRUNTIME)


STEP = "sentence_embedding_model"


def name_lone(name: str, exported: Exported) -> dict[str, object]:
    """Return what publishes the graph by itself, with the very tensors that it has as a step."""
    signature = exported.source.task.signature
    return {
        "names": ModelNames(name=name, is_ensemble=False),
        "signature": ModelSignature(inputs=signature.inputs, outputs=signature.outputs),
        "files": replace(exported.files, steps={}),
        "report": replace(exported.report, sha256={"model.onnx": exported.report.sha256["model.onnx"]}),
    }


def forget_owners(repository: Path) -> None:
    """Take out of every config what says whose it is, as releases before this one wrote them."""
    for path in repository.glob("*/config.pbtxt"):
        config = parse_config(path.read_text())
        del config.parameters[OWNER_PARAMETER]
        path.write_text(render_config(config))


@pytest.mark.parametrize("is_old", [False, True])
def test_a_name_that_is_another_models_step_is_refused(is_old: bool, exported: Exported, tmp_path: Path) -> None:
    publish_files(exported, tmp_path)
    if is_old:
        forget_owners(tmp_path)
    before = fingerprint(tmp_path)
    for changes in ({"names": ModelNames(name=STEP)}, name_lone(STEP, exported)):
        with pytest.raises(RepositoryError) as caught:
            publish_files(exported, tmp_path, **changes)
        assert str(caught.value) == (
            f"{tmp_path / STEP} is not a part of the model {STEP}: expected nothing there, or what was published as "
            f"{STEP}, got a part of the model sentence_embedding; pass another --name."
        )
        with pytest.raises(RepositoryError, match="got a part of the model sentence_embedding; pass another --name"):
            check_destination(tmp_path, STEP)
    assert fingerprint(tmp_path) == before


@pytest.mark.parametrize("end", ["_preprocess", "_model", "_postprocess"])
@pytest.mark.parametrize("whose", ["another's", "another's of before", "nobody's", "nobody's without a config"])
def test_a_model_that_bears_the_name_of_a_step_is_neither_taken_nor_cleared_away(
    whose: str, end: str, exported: Exported, tmp_path: Path
) -> None:
    taken = f"sentence_embedding{end}"
    publish_files(exported, tmp_path, **name_lone(taken, exported))
    if whose != "another's":
        forget_owners(tmp_path)
    if whose.startswith("nobody's"):
        for document in ("golden.json", "verification.json"):
            (tmp_path / taken / "1" / document).unlink()
    if whose.endswith("config"):
        (tmp_path / taken / "config.pbtxt").unlink()
    (tmp_path / taken / "staging-notes").mkdir()
    before = fingerprint(tmp_path)
    names = replace(NAMES, has_postprocess=True)
    with pytest.raises(RepositoryError, match=f"{taken} is not a part of the model sentence_embedding: expected "):
        check_owners(tmp_path, names.name, names.all)
    if end != "_postprocess":
        with pytest.raises(RepositoryError, match=f"{taken} is not a part of the model sentence_embedding: expected "):
            publish_files(exported, tmp_path)
    assert fingerprint(tmp_path) == before


def test_what_releases_before_published_is_their_models_still(
    exported: Exported, other: Exported, tmp_path: Path
) -> None:
    publish_files(exported, tmp_path / "models")
    publish_files(exported, tmp_path / "models", **name_lone("lone", exported))
    forget_owners(tmp_path / "models")
    assert publish_files(other, tmp_path / "models").version == 2
    assert publish_files(other, tmp_path / "models", **name_lone("lone", other)).version == 2
    assert find_owner(tmp_path / "models", STEP) == "sentence_embedding"
    assert is_consistent(tmp_path / "models")


def test_a_config_that_nobody_can_read_is_not_overwritten(exported: Exported, tmp_path: Path) -> None:
    (tmp_path / "sentence_embedding").mkdir()
    (tmp_path / "sentence_embedding" / "config.pbtxt").write_text("platform: {")
    with pytest.raises(RepositoryError, match=r"config\.pbtxt cannot be read"):
        publish_files(exported, tmp_path)


def test_two_publications_at_once_do_not_mix(exported: Exported, tmp_path: Path) -> None:
    told: list[str] = []
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(RepositoryError, match="another change is at work .* within 0.2 s, got a lock; wait"):
        publish_files(exported, tmp_path, patience_s=0.2)
    with pytest.raises(RepositoryError, match="another change is at work"):
        check_destination(tmp_path, "tiny", told.append, patience_s=0.2)
    assert told == [f"another change is at work in {tmp_path}; waiting up to 0.2 s for its end"]
    release = threading.Timer(1.0, os.close, [descriptor])
    release.start()
    assert publish_files(exported, tmp_path).outcome == "created", "it waits for one that ends"
    release.join()


def test_a_repository_that_cannot_be_written_is_told_before_anything_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for repository in (tmp_path / "file", tmp_path / "file" / "models"):
        with pytest.raises(RepositoryError) as caught:
            check_destination(repository, "tiny")
        assert str(caught.value) == (
            f"{repository} cannot be a repository: expected a folder, or a place for one, got {tmp_path / 'file'}, "
            f"which is not a folder; choose another place."
        )
    with pytest.raises(RepositoryError, match="the model's name cannot be used"):
        check_destination(tmp_path / "models", "a/b")
    child = os.fork()
    if child == 0:
        # Root may write everything.
        os.setuid(65534)
        try:
            check_destination(tmp_path / "models", "tiny")
        except RepositoryError as exc:
            os._exit(0 if "cannot be written: expected the right to write in /" in str(exc) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    check_destination(tmp_path / "models" / "new", "tiny")
    assert not (tmp_path / "models").exists()


def test_what_a_killed_publication_left_is_cleared_away(exported: Exported, tmp_path: Path) -> None:
    publish_files(exported, tmp_path)
    before = fingerprint(tmp_path)
    (tmp_path / STEP / "staging-abc").mkdir()
    (tmp_path / STEP / "2").mkdir()
    (tmp_path / STEP / "2" / "model.onnx").touch()
    (tmp_path / "sentence_embedding" / "staging-def").mkdir()
    (tmp_path / "sentence_embedding" / "staging-config.pbtxt").touch()
    (tmp_path / STEP / "staging-config.pbtxt.0123abcd").touch()
    assert publish_files(exported, tmp_path).outcome == "unchanged"
    assert fingerprint(tmp_path) == before


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_link_or_a_pipe_in_the_place_of_what_is_written_is_taken_away(
    kind: str, exported: Exported, other: Exported, tmp_path: Path
) -> None:
    repository, elsewhere = tmp_path / "models", tmp_path / "elsewhere"
    elsewhere.write_text("somebody's")
    publish_files(exported, repository)
    make = os.mkfifo if kind == "pipe" else partial(os.symlink, elsewhere)
    for name in ("sentence_embedding", STEP):
        make(repository / name / "staging-config.pbtxt")
    publish_files(other, repository)
    assert not list(repository.glob("*/staging-*"))
    assert not (repository / "sentence_embedding" / "config.pbtxt").is_symlink()
    assert is_consistent(repository)
    assert elsewhere.read_text() == "somebody's"


def test_a_version_with_a_pipe_in_the_place_of_a_file_is_not_the_same(exported: Exported, tmp_path: Path) -> None:
    publish_files(exported, tmp_path)
    path = tmp_path / STEP / "1" / "model.onnx"
    path.unlink()
    os.mkfifo(path)
    assert publish_files(exported, tmp_path).version == 2
    assert is_consistent(tmp_path)


def test_what_no_publication_left_stays(exported: Exported, other: Exported, tmp_path: Path) -> None:
    repository = tmp_path / "models"
    publish_files(exported, repository)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").touch()
    (repository / STEP / "staging-link").symlink_to(tmp_path / "elsewhere")
    (repository / STEP / "staging-notes.txt").touch()
    (repository / STEP / "2").mkdir()
    (repository / STEP / "3").symlink_to(tmp_path / "elsewhere")
    (repository / "sentence_embedding" / "4").touch()
    before = fingerprint(repository)
    assert publish_files(other, repository).version == 5, "no entry of that name is in its way"
    after = fingerprint(repository)
    assert {path: after.get(path) for path in before if not path.endswith("config.pbtxt")} == {
        path: digest for path, digest in before.items() if not path.endswith("config.pbtxt")
    }
    assert is_consistent(repository)


# Events that Python raises for every change of the file system (docs.python.org, "Audit events table").
_EVENTS = ("open", "os.mkdir", "os.rename", "os.rmdir", "os.remove", "tempfile.mkdtemp", "os.chmod")


def publish_until(step: int, action: str, exported: Exported, repository: Path) -> "subprocess.Popen[bytes]":
    """Fork a process that publishes, and at its `step`-th file operation in the repository is killed or interrupted."""
    seen = 0

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        if event in _EVENTS and str(repository) in str(arguments[0]):
            seen += 1
            if seen == step:
                if action == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise KeyboardInterrupt

    child = os.fork()
    if child == 0:
        sys.addaudithook(hook)
        try:
            publish_files(exported, repository)
        except KeyboardInterrupt:
            os._exit(130)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])  # type: ignore[return-value]


def each_step(
    action: str, before: Path, exported: Exported, tmp_path: Path, check: Callable[[Path], None]
) -> tuple[int, set[str]]:
    """Publish to a copy of `before` once for every step at which it can end; return how many there were."""
    step, states = 0, set()
    while True:
        step += 1
        repository = tmp_path / f"step-{step}"
        shutil.copytree(before, repository)
        code = publish_until(step, action, exported, repository)
        if code == 0:
            return step - 1, states
        check(repository)
        configs = sorted(repository.glob("*/config.pbtxt"))
        state = json.dumps([path.read_text() for path in configs]) + str(sorted(repository.glob("*/[0-9]*")))
        state = state.replace(f"step-{step}", "step")
        if state in states:
            shutil.rmtree(repository)
        states.add(state)


def test_killed_at_any_moment_it_leaves_a_repository_that_is_served(
    exported: Exported, other: Exported, tmp_path: Path
) -> None:
    before = tmp_path / "before"
    publish_files(exported, before)

    def check(repository: Path) -> None:
        assert is_consistent(repository), repository

    steps, states = each_step("kill", before, other, tmp_path, check)
    assert steps > 30
    # Of the distinct states a third is then really served, and the next publication ends as if nothing had happened.
    distinct = sorted(path for path in tmp_path.glob("step-*") if path.is_dir())[:-1]
    assert len(distinct) == len(states) >= 6
    for index, repository in enumerate(distinct):
        if index % 3 == 0:
            with serve(repository):
                pass
        assert publish_files(other, repository).version in (2, 3)
        assert is_consistent(repository)
        assert not list(repository.glob("*/staging-*"))


@pytest.mark.rarer
def test_interrupted_at_any_moment_it_leaves_the_repository_as_it_was(
    exported: Exported, other: Exported, tmp_path: Path
) -> None:
    before = tmp_path / "before"
    publish_files(exported, before)
    as_it_was = fingerprint(before)

    def check(repository: Path) -> None:
        assert fingerprint(repository) == as_it_was

    steps, _ = each_step("interrupt", before, other, tmp_path, check)
    assert steps > 30


@pytest.mark.rarer
def test_a_first_publication_interrupted_at_any_moment_leaves_nothing(exported: Exported, tmp_path: Path) -> None:
    before = tmp_path / "before"
    before.mkdir()

    def check(repository: Path) -> None:
        assert fingerprint(repository) == {}

    steps, _ = each_step("interrupt", before, exported, tmp_path, check)
    assert steps > 20


def test_a_full_disk_is_one_sentence_and_leaves_nothing(exported: Exported, tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        # The kernel refuses to let any file grow beyond this, as a full disk would.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            publish_files(exported, tmp_path / "models")
        except RepositoryError as exc:
            told = (
                r"expected no limit on the size of a file, got File too large for \S+/models/\S+; raise the limit on "
            )
            is_told = "cannot be written" in str(exc) and re.search(told, str(exc)) and "free the disk" not in str(exc)
            os._exit(0 if is_told else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not (tmp_path / "models").exists()
