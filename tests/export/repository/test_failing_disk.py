"""A publication on a disk that fails, and goes on failing: whatever it refuses, something whole stays served."""

import errno
import itertools
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from failing_disk import FAILURES, NEVER, NO_LINKS, Failure, fail_once, kill, refuse_calls, run_forked
from harness import Exported, fingerprint
from repositories import is_consistent, make_other, publish_files

from export.errors import RepositoryError
from export.repository.contents import find_active_version

NAME = "sentence_embedding"

# `make failing-disk` tries every moment; each run the one in so many, which is another one for each way to fail.
EVERY = int(os.environ.get("MODELYARD_DISK_EVERY", "7"))

NEEDLESS = ("linking fails", "first")

# What a publication ended in.
DONE, REFUSED, STUCK, WRONG = 0, 10, 11, 12


@pytest.fixture
def disk() -> Iterator[Path]:
    """Return a folder in memory, where syncing thousands of files takes no time."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture
def other(exported: Exported, disk: Path) -> Exported:
    return make_other(exported, disk / "other")


def judge(error: BaseException) -> int:
    sentence = str(error)
    is_told = "cannot be written to" in sentence or "cannot be read: got Input/output error; check the disk" in sentence
    if not isinstance(error, RepositoryError) or not is_told or "\n" in sentence:
        return WRONG
    return STUCK if "what was begun cannot be undone: got" in sentence and "is active; mend" in sentence else REFUSED


def prepare(kind: str, exported: Exported, other: Exported, disk: Path) -> tuple[Path, Exported]:
    """Return a repository before its first or its second version, and what is to be published."""
    repository = disk / "before"
    repository.mkdir()
    if kind == "first":
        return repository, exported
    publish_files(exported, repository)
    return repository, other


def describe_state(repository: Path) -> str:
    files = [str(path.relative_to(repository)) for path in sorted(repository.glob("*/[0-9]*"))]
    return json.dumps([path.read_text() for path in sorted(repository.glob("*/config.pbtxt"))]) + str(files)


def check(repository: Path, code: int, before: dict[str, str], *, may_leave_litter: bool) -> None:
    """Check that the old version is there to the byte and served, or the new one where even undoing failed."""
    after = fingerprint(repository)
    old = {path: digest for path, digest in before.items() if "/1/" in path}
    assert code in (DONE, REFUSED, STUCK)
    assert is_consistent(repository)
    assert old.items() <= after.items()
    if code == REFUSED:
        assert find_active_version(repository, NAME) == (1 if old else 0)
        # An inode for a file that was set aside and put back is the same; so are the bytes.
        assert {path: after.get(path) for path in before} == before
        assert may_leave_litter or after == before


# Where nothing is replaced, nothing is set aside by a link.
@pytest.mark.parametrize(
    ("how", "kind"), [(how, kind) for kind in ("first", "second") for how in FAILURES if (how, kind) != NEEDLESS]
)
def test_wherever_a_disk_begins_to_fail_for_good_something_whole_is_served(
    how: str, kind: str, exported: Exported, other: Exported, disk: Path
) -> None:
    failure = FAILURES[how]
    repository, new = prepare(kind, exported, other, disk)
    before = fingerprint(repository)
    states: dict[str, Path] = {}
    for call in itertools.count(1 + list(FAILURES).index(how) % EVERY, EVERY):
        tried = Path(shutil.copytree(repository, disk / f"tried-{call}"))
        moments = {call: partial(refuse_calls, failure)}
        code = run_forked(partial(publish_files, new, tried), moments, failure.functions, judge)
        if code == NEVER:
            break
        # What cannot be removed stays, and is removed by the next publication.
        check(tried, code, before, may_leave_litter="remov" in how or "mounted" in how)
        state = describe_state(tried)
        if states.setdefault(state, tried) != tried:
            shutil.rmtree(tried)
    assert call > 2
    for tried in states.values():
        assert publish_files(new, tried).version in (1, 2, 3)
        assert is_consistent(tried)
        assert not list(tried.glob("*/staging-*"))


@pytest.mark.parametrize("kind", ["first", "second"])
def test_a_single_failure_anywhere_leaves_all_as_it_was(
    kind: str, exported: Exported, other: Exported, disk: Path
) -> None:
    repository, new = prepare(kind, exported, other, disk)
    before = fingerprint(repository)
    for call in itertools.count(1, EVERY):
        tried = Path(shutil.copytree(repository, disk / "tried"))
        code = run_forked(partial(publish_files, new, tried), {call: fail_once}, judge=judge)
        if code == NEVER:
            break
        assert code in (DONE, REFUSED)
        check(tried, code, before, may_leave_litter=False)
        shutil.rmtree(tried)
    assert call > 40


def test_killed_while_it_undoes_it_leaves_what_is_served(exported: Exported, other: Exported, disk: Path) -> None:
    repository, new = prepare("second", exported, other, disk)
    states: dict[str, Path] = {}
    killed = 0
    # It begins to fail while versions are renamed and configurations replaced, and is killed on the way back.
    for begin, later in itertools.product(range(60, 120, EVERY + 3), range(1, 30, EVERY)):
        moments = {begin: partial(refuse_calls, FAILURES["syncing fails"]), begin + later: kill}
        tried = Path(shutil.copytree(repository, disk / f"tried-{begin}-{later}"))
        killed += run_forked(partial(publish_files, new, tried), moments, judge=judge) < 0
        assert is_consistent(tried)
        if states.setdefault(describe_state(tried), tried) != tried:
            shutil.rmtree(tried)
    assert killed > 10
    assert killed > 10
    assert len(states) > 1
    # They are among those that being killed on the way forth leaves, each of which another test really serves.
    for tried in states.values():
        assert publish_files(new, tried).version in (2, 3)
        assert is_consistent(tried)
        assert not list(tried.glob("*/staging-*"))


def test_a_file_system_without_hard_links_is_published_to(exported: Exported, other: Exported, disk: Path) -> None:
    repository, new = prepare("second", exported, other, disk)
    moments = {1: partial(refuse_calls, NO_LINKS)}
    assert run_forked(partial(publish_files, new, repository), moments, judge=judge) == DONE
    assert find_active_version(repository, NAME) == 2
    assert is_consistent(repository)


def test_a_full_disk_is_told_with_the_file_and_the_room_that_is_needed(
    exported: Exported, other: Exported, disk: Path
) -> None:
    repository, new = prepare("second", exported, other, disk)
    size = new.model_file.stat().st_size / 1e6
    told = (
        rf"got No space left on device \(the version takes {size:.0f}\.\d MB\) for \S+/staging-2-\w+/model\.onnx; free"
    )

    def judge_full(error: BaseException) -> int:
        return 5 if re.search(told, str(error)) else 6

    full = Failure(FAILURES["the disk is full"].calls, errno.ENOSPC, ("sendfile",))
    code = run_forked(
        partial(publish_files, new, repository), {1: partial(refuse_calls, full)}, ("sendfile",), judge_full
    )
    assert code == 5


def test_the_disk_of_these_tests_fails_as_a_real_one(disk: Path) -> None:
    """Python is told of a lost write when the file is closed, and the file is there, empty."""

    def write(failure: Failure) -> None:
        refuse_calls(failure)
        (disk / "file").write_text("lost")

    for how, error in (("writing fails", "Input/output error"), ("the disk is full", "No space left on device")):
        code = run_forked(
            partial(write, FAILURES[how]),
            {1: lambda: None},
            judge=lambda exc, error=error: 5 if error in str(exc) else 6,
        )
        assert code == 5
        assert (disk / "file").read_bytes() == b""
