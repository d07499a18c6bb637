"""What configurations ask of tritonserver as a whole."""

from pathlib import Path

import pytest

from server.following.wishes import count_processes, keeps_answers, limits_rate, list_options

LIMITED = 'instance_group [ { count: 1 rate_limiter { resources [ { name: "cores" count: 1 } ] } } ]'
PLAIN = 'name: "rate_limiter" instance_group [ { count: 1 } ]'


@pytest.mark.parametrize(
    ("configs", "passed", "expected"),
    [
        ([PLAIN], [], ["--cache-config"]),
        ([PLAIN, LIMITED], [], ["--cache-config", "--rate-limit"]),
        ([LIMITED], ["--rate-limit=off"], ["--cache-config"]),
        ([LIMITED], ["--cache-config", "local,size=1048576"], ["--rate-limit"]),
        (["{"], [], ["--cache-config"]),
    ],
)
def test_what_is_asked_for_is_turned_on_unless_the_reader_says_otherwise(
    configs: list[str], passed: list[str], expected: list[str], tmp_path: Path
) -> None:
    (tmp_path / "local").mkdir()
    assert [option.partition("=")[0] for option in list_options(configs, tmp_path, passed)] == expected
    assert "--cache-config" not in str(list_options(configs, tmp_path / "none", passed))


def test_processes_are_counted_and_those_of_one_rollout() -> None:
    ensemble = 'ensemble_scheduling { step [ { model_name: "x" } ] }'
    several = "instance_group [ { count: 2 kind: KIND_CPU }, { count: 3 } ]"
    assert count_processes([PLAIN, LIMITED, ensemble, several, 'name: "one"', "{"]) == 1 + 1 + 0 + 5 + 1 + 1 + 5
    assert count_processes([ensemble]) == 0
    assert count_processes([]) == 0


def test_what_a_configuration_asks_for() -> None:
    assert limits_rate(LIMITED)
    assert not limits_rate(PLAIN)
    assert keeps_answers("response_cache { enable: true }")
    assert not keeps_answers("response_cache { enable: false }")
