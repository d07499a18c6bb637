"""`make soak` in small: overload is refused in words, what is accepted is answered right, and it recovers by itself."""

import asyncio
import shutil
from pathlib import Path

import pytest
from benches.soak import open_clients, saturate, soak
from harness import Published
from launcher import running

from export.repository.model_config import MAX_QUEUE_SIZE

SECONDS = 12.0

# So short that the excess of a second overflows them.
QUEUE = 64


@pytest.fixture
def repository(published: Published, tmp_path: Path) -> Path:
    repository = Path(shutil.copytree(published.repository, tmp_path / "models"))
    for step in ("preprocess", "model"):
        config = repository / f"sentence_embedding_{step}" / "config.pbtxt"
        text = config.read_text()
        assert f"max_queue_size: {MAX_QUEUE_SIZE}" in text
        config.write_text(text.replace(f"max_queue_size: {MAX_QUEUE_SIZE}", f"max_queue_size: {QUEUE}"))
    return repository


@pytest.mark.rarer
def test_more_than_it_can_answer_is_refused_in_words_and_the_rest_answered_right(repository: Path) -> None:
    with running(repository) as server:
        server.read_until("serving HTTP")
        server.follow()
        phases, memory = asyncio.run(soak(server, repository, SECONDS))
        for phase in phases:
            assert phase.is_sound, phase.describe()
            assert phase.latencies
        assert len(memory.rows) >= 2
        assert all(size > 0 for _, found in memory.rows for size in found.values())

        async def ask_once_more() -> None:
            async with open_clients(server, repository) as clients:
                after = await saturate(clients, 0.1)
            assert after.latencies and not after.errors, after.describe()

        asyncio.run(ask_once_more())
        deaths = {
            name: value for name, value in server.read_metrics().items() if "deaths" in name or "restarts" in name
        }
        assert set(deaths.values()) == {0.0}
