"""Two versions of one model, and a server of a copy of them that a test may spoil."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from followed import publish_two, serving_copy
from harness import make_once
from launcher import Running


@pytest.fixture(scope="session")
def repository(checkpoint: Path) -> Path:
    return make_once("following", lambda folder: publish_two(checkpoint, folder)) / "models"


@pytest.fixture
def served(repository: Path, tmp_path: Path) -> Iterator[tuple[Running, Path]]:
    with serving_copy(repository, tmp_path / "models") as server:
        yield server, tmp_path / "models"
