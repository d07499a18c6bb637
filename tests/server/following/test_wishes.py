"""What configurations ask of tritonserver as a whole."""

from pathlib import Path

import pytest

from server.following.wishes import keeps_answers, limits_rate, list_options

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


def test_what_a_configuration_asks_for() -> None:
    assert limits_rate(LIMITED)
    assert not limits_rate(PLAIN)
    assert keeps_answers("response_cache { enable: true }")
    assert not keeps_answers("response_cache { enable: false }")
