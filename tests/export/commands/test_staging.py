import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from export.consolidation.staging import stage_folder
from export.errors import CheckpointError


def stage(target: Path) -> None:
    with stage_folder(target) as staged:
        (staged / "x").write_text("x")


def before_the_first_opening(monkeypatch: pytest.MonkeyPatch, act: Callable[[Path], None]) -> None:
    """Let another run `act` on the folder that is about to be opened, once."""
    opened, waiting = os.open, [act]

    def open_late(path: Any, *args: Any, **options: Any) -> int:
        if ".partial-" in str(path) and waiting:
            waiting.pop()(Path(path))
        return opened(path, *args, **options)

    monkeypatch.setattr(os, "open", open_late)


def test_a_folder_that_another_run_took_for_abandoned_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before_the_first_opening(monkeypatch, Path.rmdir)
    stage(tmp_path / "out")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "x"]


def test_a_run_that_ends_while_another_looks_for_abandoned_folders_is_no_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".out.partial-0").mkdir()
    before_the_first_opening(monkeypatch, shutil.rmtree)
    stage(tmp_path / "out")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "x"]


def test_what_is_called_like_a_staged_folder_and_is_none_is_let_be(tmp_path: Path) -> None:
    (tmp_path / "else").mkdir()
    (tmp_path / ".out.partial-file").write_text("x")
    (tmp_path / ".out.partial-link").symlink_to("else")
    stage(tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *(".out.partial-file", ".out.partial-link", "else", "out")
    ]


def test_a_name_too_long_is_refused(tmp_path: Path) -> None:
    for length in (250, 300):
        with pytest.raises(CheckpointError, match="cannot be made: .* got File name too long; make the folder above"):
            stage(tmp_path / ("n" * length))
    assert not list(tmp_path.iterdir())
