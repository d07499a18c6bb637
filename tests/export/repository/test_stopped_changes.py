"""Changes that are stopped at any moment, by a kill or a disk that fails: what is active then, and what is left."""

import itertools
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from failing_disk import FAILURES, NEVER, NO_LOCKS, kill, refuse_calls, run_forked
from harness import Exported, Finished
from repositories import ask, is_consistent, make_other, publish_files

from export.errors import RepositoryError
from export.repository.activation import activate
from export.repository.contents import find_active_version, list_models, list_versions
from export.repository.integrity import Finding, find_damage
from export.repository.promotion import promote
from export.repository.retirement import prune, remove_model

NAME = "sentence_embedding"


def test_an_empty_folder_of_somebody_elses_is_no_step_of_a_model_that_is_not_there(
    models: Path, export_cli: Callable[..., Finished]
) -> None:
    (models / "other_model").mkdir()
    done = export_cli("remove", "other", "--repository", str(models))
    assert done.code == 1 and "holds no model other of modelyard's" in done.err
    assert (models / "other_model").is_dir()


@pytest.fixture
def disk() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


CHANGES: dict[str, Callable[[Path], object]] = {
    "activate": lambda repository: activate(repository, NAME, 1),
    "prune": lambda repository: prune(repository, NAME, keep=0),
    "remove": lambda repository: remove_model(repository, NAME),
    "promote": lambda repository: promote(repository, NAME, 1, destination=repository.parent / "other"),
}


# A few moments of the many; a prune on a full disk writes nothing and is not stopped at all.
@pytest.mark.parametrize(
    ("what", "how", "step"),
    [
        ("activate", "killed", 29),
        ("prune", "killed", 29),
        ("remove", "killed", 29),
        pytest.param("promote", "killed", 83, marks=pytest.mark.rarer),
        ("activate", "the disk is full", 41),
        ("remove", "it is mounted anew without the right to write", 41),
        ("remove", "removing fails", 17),
        ("prune", "removing fails", 17),
        pytest.param("remove", "renaming fails", 5, marks=pytest.mark.rarer),
    ],
)
def test_whatever_stops_a_change_something_verified_is_active_and_the_same_again_needs_no_repair(
    what: str, how: str, step: int, exported: Exported, disk: Path
) -> None:
    before = disk / "before" / "models"
    publish_files(exported, before)
    publish_files(make_other(exported, disk / "files"), before)
    change = CHANGES[what]
    stopped = 0
    for moment in itertools.count(1, step):
        tried = disk / "tried" / "models"
        shutil.copytree(before, tried)
        if what == "promote":
            shutil.copytree(before, tried.parent / "other")
            prune(tried.parent / "other", NAME, keep=1)
        end = kill if how == "killed" else partial(refuse_calls, FAILURES[how])
        code = run_forked(partial(change, tried), {moment: end}, judge=judge)
        if code == NEVER:
            break
        stopped += code != 0
        for repository in tried.parent.iterdir():
            check(repository, may_be_gone=what == "remove")
        # Nothing is said to be done of which something stays.
        assert code or what not in ("remove", "prune") or not list(tried.glob("*/staging-*"))
        assert code or what != "remove" or list(tried.iterdir()) == []
        if what != "remove" or any(tried.iterdir()):
            change(tried)
        assert not list(disk.glob("tried/*/*/staging-*"))
        for repository in tried.parent.iterdir():
            assert list_damage(repository) == []
        assert what != "remove" or list(tried.iterdir()) == []
        shutil.rmtree(tried.parent)
    assert stopped > 1


def test_what_is_left_of_a_model_is_told_and_removed_by_its_name(
    models: Path, export_cli: Callable[..., Finished]
) -> None:
    here = ("--repository", str(models))
    # As earlier releases left it: steps of a model that is gone, one of which nothing says whose it is.
    kept = {name: (models / name / "config.pbtxt").read_bytes() for name in ("tickets", "tickets_model")}
    assert ask(export_cli, "remove", "tickets", *here)["versions"] == [1, 2]
    staged = models / "tickets_model" / "staging-1-0a1b2c3d"
    staged.mkdir(parents=True)
    (staged / "model.onnx").write_bytes(b"weights")
    (models / "tickets_model" / "inactive-config.pbtxt").write_bytes(kept["tickets_model"])
    (models / "tickets_preprocess").mkdir()
    done = export_cli("verify-repository", *here)
    assert done.code == 1
    assert done.out.splitlines()[0] == (
        f"tickets: {models}/tickets_model is a part of the model tickets, and {models}/tickets is not there; "
        "take it away with `remove tickets`."
    )
    done = export_cli("remove", "tickets", *here)
    assert (done.code, done.out.splitlines()[0]) == (0, "tickets: removed what was left of it")
    assert list(models.iterdir()) == []
    refused = export_cli("remove", "tickets", *here)
    assert refused.code == 1 and "holds no model tickets of modelyard's" in refused.err
    # As a removal leaves it that was killed: the folder of the model itself goes last.
    (models / "tickets").mkdir()
    (models / "tickets" / "inactive-config.pbtxt").write_bytes(kept["tickets"])
    done = export_cli("verify-repository", *here)
    left = (
        f"tickets: {models}/tickets has no version; take away what is left of it with `remove tickets`, or export it."
    )
    assert (done.code, done.out.splitlines()[0]) == (1, left)
    assert export_cli("remove", "tickets", *here).code == 0 and list(models.iterdir()) == []


# A removal first clears the way for the names of three configurations.
@pytest.mark.parametrize(
    ("what", "gone", "again", "call"),
    [("remove", NAME, f"remove {NAME}", 4), ("prune", f"old versions of {NAME}", f"prune {NAME} --keep 0", 1)],
)
def test_a_removal_that_leaves_something_says_so(
    what: str, gone: str, again: str, call: int, exported: Exported, disk: Path
) -> None:
    repository = disk / "models"
    publish_files(exported, repository)
    publish_files(make_other(exported, disk / "files"), repository)
    told = (
        rf"{gone} (is|are) gone from {repository}, but some of the files stay there: got Input/output error for \S+; "
        rf"mend the disk or correct the permissions, then `{again}` again takes them away\."
    )

    def judge_left(error: BaseException) -> int:
        return 5 if isinstance(error, RepositoryError) and re.fullmatch(told, str(error)) else 6

    failure = FAILURES["removing fails"]
    moments = {call: partial(refuse_calls, failure)}
    code = run_forked(partial(CHANGES[what], repository), moments, failure.functions, judge_left)
    assert code == 5
    assert list(repository.glob("*/staging-*"))
    CHANGES[what](repository)
    assert not list(repository.glob("*/staging-*"))


def test_a_prune_that_has_nothing_to_remove_leaves_nothing_on_a_disk_that_removes_nothing(
    exported: Exported, disk: Path
) -> None:
    repository = disk / "models"
    publish_files(exported, repository)
    refuse = partial(refuse_calls, FAILURES["it is mounted anew without the right to write"])
    assert run_forked(partial(prune, repository, NAME, keep=1), {1: refuse}, ("flock",)) == 0


@pytest.mark.parametrize("what", ["activate", "promote"])
def test_a_file_system_without_locks_is_told_as_such(what: str, exported: Exported, disk: Path) -> None:
    repository = disk / "models"
    publish_files(exported, repository)
    place = repository / NAME / "1" if what == "promote" else repository
    told = (
        f"{place} cannot be locked against other changes: expected a file system with locks (flock), got No locks "
        "available; mount it with locks (NFS without nolock, Lustre with flock), or do it in a repository on a disk "
        "that has them and copy that."
    )

    def judge_told(error: BaseException) -> int:
        return 5 if isinstance(error, RepositoryError) and str(error) == told else 6

    moments = {1: partial(refuse_calls, NO_LOCKS)}
    assert run_forked(partial(CHANGES[what], repository), moments, NO_LOCKS.functions, judge_told) == 5


def list_damage(repository: Path) -> list[Finding]:
    """Return what is damaged in a repository, where nothing may be left to look at once its only model is removed."""
    return list(find_damage(repository)) if list_models(repository) else []


def judge(error: BaseException) -> int:
    return 10 if isinstance(error, RepositoryError | OSError) and "\n" not in str(error) else 11


def check(repository: Path, *, may_be_gone: bool) -> None:
    """Check that all that is there is whole and, to the byte, what was published."""
    active = find_active_version(repository, NAME)
    assert active in list_versions(repository / NAME) or (may_be_gone and not active)
    assert may_be_gone or is_consistent(repository)
    is_half_gone = may_be_gone and not list_versions(repository / NAME)
    assert {finding.what for finding in list_damage(repository)} <= ({"has no version"} if is_half_gone else set())
