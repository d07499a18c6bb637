import fcntl
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from harness import Exported, fingerprint
from launcher import write_older_golden

from demo.serving import serve
from export.errors import RepositoryError
from export.proof.verify import hash_file
from export.repository.config_file import parse_config
from export.repository.names import ModelNames, check_name
from export.repository.publication import Publication, check_contract, publish

NAMES = ModelNames(name="sentence_embedding")


def publish_files(exported: Exported, repository: Path, **changes: object) -> Publication:
    arguments = {
        "repository": repository,
        "names": NAMES,
        "signature": exported.source.task.signature,
        "files": exported.files,
        "report": exported.report,
    }
    return publish(**(arguments | changes))  # type: ignore[arg-type]


@pytest.fixture
def other(exported: Exported, tmp_path: Path) -> Exported:
    """Return the same model in other bytes, with a report that vouches for them."""
    model_file = Path(shutil.copytree(exported.model_file.parent, tmp_path / "other")) / "model.onnx"
    model = onnx.load(model_file)
    model.doc_string = "other bytes, same meaning"
    onnx.save(model, model_file)
    report = replace(exported.report, sha256=exported.report.sha256 | {"model.onnx": hash_file(model_file)})
    return replace(exported, files=replace(exported.files, model=(model_file,)), report=report)


def read_config(repository: Path, model_name: str):
    return parse_config((repository / model_name / "config.pbtxt").read_text())


def served(repository: Path, model_name: str) -> list[int]:
    return list(read_config(repository, model_name).version_policy.specific.versions)


def test_a_first_publication_makes_version_1_of_every_model(exported: Exported, tmp_path: Path) -> None:
    publication = publish_files(exported, tmp_path / "models")
    assert (publication.version, publication.outcome) == (1, "created")
    assert sorted(path for path, kind in fingerprint(tmp_path / "models").items() if kind != "folder") == [
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
        check_contract(tmp_path, NAMES, wider)


def test_a_name_that_is_another_models_step_is_refused(exported: Exported, tmp_path: Path) -> None:
    publish_files(exported, tmp_path)
    before = fingerprint(tmp_path)
    with pytest.raises(RepositoryError, match="sentence_embedding_model is already published with another contract"):
        publish_files(exported, tmp_path, names=ModelNames(name="sentence_embedding_model"))
    assert fingerprint(tmp_path) == before


def test_a_config_that_nobody_can_read_is_not_overwritten(exported: Exported, tmp_path: Path) -> None:
    (tmp_path / "sentence_embedding").mkdir()
    (tmp_path / "sentence_embedding" / "config.pbtxt").write_text("platform: {")
    with pytest.raises(RepositoryError, match=r"config\.pbtxt cannot be read"):
        publish_files(exported, tmp_path)


def test_two_publications_at_once_do_not_mix(exported: Exported, tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(RepositoryError, match="another publication is at work"):
        publish_files(exported, tmp_path)
    os.close(descriptor)
    assert publish_files(exported, tmp_path).outcome == "created"


def test_what_a_killed_publication_left_is_cleared_away(exported: Exported, tmp_path: Path) -> None:
    publish_files(exported, tmp_path)
    before = fingerprint(tmp_path)
    (tmp_path / "sentence_embedding_model" / "staging-abc").mkdir()
    (tmp_path / "sentence_embedding_model" / "2").mkdir()
    (tmp_path / "sentence_embedding_model" / "2" / "model.onnx").touch()
    (tmp_path / "sentence_embedding" / "staging-config.pbtxt").touch()
    assert publish_files(exported, tmp_path).outcome == "unchanged"
    assert fingerprint(tmp_path) == before


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


def is_consistent(repository: Path) -> bool:
    """Tell whether the ensemble, if it is published, finds every step at the version it names, whole and served."""
    if not (repository / "sentence_embedding" / "config.pbtxt").is_file():
        return True
    steps = read_config(repository, "sentence_embedding").ensemble_scheduling.step
    version = steps[0].model_version
    return (
        served(repository, "sentence_embedding") == [version]
        and (repository / "sentence_embedding" / str(version) / "verification.json").is_file()
        and all(step.model_version in served(repository, step.model_name) for step in steps)
        and all(
            (repository / step.model_name / str(each)).is_dir()
            for step in steps
            for each in served(repository, step.model_name)
        )
        and (repository / "sentence_embedding_model" / str(version) / "model.onnx").stat().st_size > 1000
        and (repository / "sentence_embedding_preprocess" / str(version) / "tokenizer.json").stat().st_size > 1000
    )


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
    # Every distinct state is then really served, and the next publication ends as if nothing had happened.
    distinct = sorted(path for path in tmp_path.glob("step-*") if path.is_dir())[:-1]
    assert len(distinct) == len(states) >= 6
    for repository in distinct:
        with serve(repository):
            pass
        assert publish_files(other, repository).version in (2, 3)
        assert is_consistent(repository)
        assert not list(repository.glob("*/staging-*"))


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
            os._exit(0 if "cannot be written" in str(exc) and "File too large" in str(exc) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not (tmp_path / "models").exists()
