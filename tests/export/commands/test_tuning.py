"""`tune` finds how a model is best served: the search on known figures, and all of it on a real server."""

import json
import os
import random
import shutil
from argparse import Namespace
from pathlib import Path

import pytest
from harness import CHECKOUT, run

from export.commands.tune import _say_next
from export.errors import RepositoryError, SettingsError
from export.lint.linter import lint
from export.repository.config_file import parse_config
from export.repository.contents import find_active_version
from export.repository.integrity import check_whole
from export.repository.serving_change import serve_otherwise
from export.repository.version import Version, find_version
from export.targets import find_target
from export.tuning.journal import Journal
from export.tuning.search import Figures, plan_rounds, search
from export.tuning.ways import Way, find_graph, list_ways, read_way, write_way

LIMIT_MS = 50.0


def figures_of(way: int) -> Figures:
    """The more, the faster and the later: from 40 on beyond the limit."""
    return Figures(requests_per_s=100.0 + way, p50_ms=way / 2, p99_ms=10.0 + way)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 10, 60])
def test_the_best_within_the_limit_is_found_and_what_is_now_stays_until_the_end(count: int) -> None:
    ways = random.Random(count).sample(range(60), count)
    tried = search(ways, lambda way, length, turn: figures_of(way), p99_ms=LIMIT_MS, has_time=lambda: True)
    within = [way for way in ways if figures_of(way).p99_ms <= LIMIT_MS]
    assert tried[0].way == (max(within) if within else min(ways))
    assert sorted(each.way for each in tried) == sorted(ways)
    last = len(plan_rounds(count))
    assert {each.way: each.rounds for each in tried}[ways[0]] == last
    assert sum(each.rounds == last for each in tried) <= 4


def test_with_noise_of_a_tenth_it_is_within_a_twentieth_of_the_best() -> None:
    noise = random.Random(0)

    def measure(way: int, length: int, turn: int) -> Figures:
        exact = figures_of(way)
        # The longer, the less.
        factor = 1 + noise.uniform(-0.1, 0.1) / length
        return Figures(requests_per_s=exact.requests_per_s * factor, p50_ms=exact.p50_ms, p99_ms=exact.p99_ms)

    for _ in range(200):
        (best, *_) = search(range(0, 40, 2), measure, p99_ms=LIMIT_MS, has_time=lambda: True)
        assert figures_of(best.way).requests_per_s >= 0.95 * figures_of(38).requests_per_s


def test_without_time_what_was_measured_counts() -> None:
    measured: list[int] = []

    def measure(way: int, length: int, turn: int) -> Figures:
        measured.append(way)
        return figures_of(way)

    def tries(enough: int) -> list[int]:
        measured.clear()
        found = search(range(9), measure, p99_ms=LIMIT_MS, has_time=lambda: len(measured) < enough)
        return [each.way for each in found]

    assert tries(0) == [0]
    assert tries(4) == [3, 2, 1, 0]
    # The second round of three and what is now had begun: of these, that which was measured in it.
    assert tries(10)[0] == 8


def test_what_was_measured_is_not_measured_again_and_half_a_line_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "tune" / "journal.jsonl"
    journal = Journal(path)
    assert journal.measure((Way(instances=2), 1, 0), lambda: figures_of(3)) == figures_of(3)
    with path.open("a") as file:
        file.write('{"key": "half of')
    assert Journal(path).measure("more", lambda: figures_of(4)) == figures_of(4)
    again = Journal(path)
    assert len(again) == 2
    assert again.measure((Way(instances=2), 1, 0), lambda: pytest.fail("measured again")) == figures_of(3)


def test_every_way_is_written_as_it_is_read_and_the_first_is_that_of_today(two_versions: Path) -> None:
    configs = find_version(two_versions, "tickets", 1).read_configs()
    graph = find_graph(configs, "tickets")
    assert graph == "tickets_model"
    ways = list_ways(configs[graph])
    assert ways[0] == Way(instances=2, threads=1, max_queue_delay_microseconds=0)
    assert len(set(ways)) == len(ways) > 3
    for way in ways:
        assert read_way(write_way(configs[graph], way)) == way
    assert write_way(configs[graph], ways[0]) == configs[graph]
    cores = len(os.sched_getaffinity(0))
    assert all(way.instances * (way.threads or 1) <= 2 * cores for way in ways)


def test_a_model_whose_copies_nobody_chooses_is_refused() -> None:
    plan = parse_config('name: "plan" backend: "tensorrt"')
    with pytest.raises(SettingsError, match="plan cannot be tuned: expected a graph whose copies can be chosen, got"):
        find_graph({"plan": plan}, "plan")


def test_the_best_is_told_and_what_cannot_be_done_is_refused(two_versions: Path, tmp_path: Path) -> None:
    repository = Path(shutil.copytree(two_versions, tmp_path / "models"))
    before = {path: path.read_bytes() for path in repository.rglob("*") if path.is_file()}
    place = ["--repository", str(repository)]
    environment = os.environ | {"PYTHONPATH": str(CHECKOUT)}
    words = ["tune", "tickets", *place, "--p99-ms", "10000", "--connections", "2", "--minutes", "0.05", "--fresh"]
    done = run("-m", "export", *words, "--json", cwd=tmp_path, env=environment)
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert "time was up before the last round" in done.err
    assert found["tried"] and found["best"]["instances"] >= 1
    assert {path: path.read_bytes() for path in repository.rglob("*") if path.is_file()} == before

    too_fast = run("-m", "export", *words[:-1], "--p99-ms", "0.001", cwd=tmp_path, env=environment)
    assert too_fast.code == 1
    assert "expected 99 in 100 within 0.001 ms, got" in too_fast.err
    # The second goes on from what the first has measured.
    assert "of an earlier search are taken over" in too_fast.err

    (tmp_path / "modelyard.toml").write_text("[models.tickets]\ninstances = 1\n")
    refused = run("-m", "export", *words, "--write", cwd=tmp_path, env=environment)
    assert refused.code == 1
    assert "modelyard.toml has a table of tickets already" in refused.err


def test_the_same_files_are_published_to_be_served_otherwise(two_versions: Path, tmp_path: Path) -> None:
    repository = Path(shutil.copytree(two_versions, tmp_path / "models"))
    version = find_version(repository, "tickets", 2)
    configs = version.read_configs()
    graph = find_graph(configs, "tickets")
    way = Way(instances=1, threads=2, max_queue_delay_microseconds=0)
    changed = {**configs, graph: write_way(configs[graph], way)}
    number = serve_otherwise(version, changed, {"instances": 1, "threads": 2, "max_queue_delay_microseconds": None})
    assert number == 3 and find_active_version(repository, "tickets") == 3
    new = find_version(repository, "tickets", 3)
    check_whole(new)
    assert read_way(new.read_configs()[graph]) == way
    assert read_way(version.read_configs()[graph]) != way
    assert new.read_report() == version.read_report()
    asked = {key: value for key, value in new.read_lock()["options"]["serving"].items() if value}
    assert asked == {"instances": 1, "threads": 2}
    # Each file of the graph lies there once.
    (old_file,) = version.find_folder(graph).glob("*.onnx")
    assert old_file.samefile(new.find_folder(graph) / old_file.name)
    assert lint(repository, find_target("24.10")) == []
    (version.find_folder(graph) / old_file.name).unlink()
    with pytest.raises(RepositoryError):
        serve_otherwise(version, changed, {})
    assert find_active_version(repository, "tickets") == 3


def test_what_is_to_be_given_again_is_told_from_the_lock(two_versions: Path, tmp_path: Path) -> None:
    repository = Path(shutil.copytree(two_versions, tmp_path / "models"))
    version = Version(repository=repository, name="tickets", number=1)
    checkpoint = version.read_publication()["checkpoint"]
    command = f"Next: python -m export run {checkpoint} --name tickets --repository {repository}"
    arguments = Namespace(apply=False, write=True, repository=repository)
    assert _say_next(arguments, version) == [command]
    path = version.folder / "modelyard.lock.json"
    content = json.loads(path.read_text())
    content["options"] |= {"base": "other", "lengths": [16, 32], "serving": {"instances": 7, "max_queue_size": 9}}
    path.write_text(json.dumps(content))
    # How many instances there are to be is what was tuned.
    assert _say_next(arguments, version) == [
        f"{command} --base other --lengths 16 32 --max-queue-size 9",
        "of --base the last part of the path is recorded alone: complete it",
    ]


def test_a_model_of_tensors_and_one_that_there_is_not_are_refused(two_versions: Path) -> None:
    done = run("-m", "export", "tune", "no_such", "--p99-ms", "50", "--repository", str(two_versions))
    assert done.code == 1
    assert "no_such" in done.err
