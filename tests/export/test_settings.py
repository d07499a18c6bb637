"""Options from a file and from the command line."""

import json
from pathlib import Path
from typing import Any

import pytest

from export.errors import SettingsError
from export.request import AddedToken
from export.settings import build_request, read_settings


def write(directory: Path, **content: Any) -> Path:
    path = directory / "export.json"
    path.write_text(json.dumps(content))
    return path


def arguments(**given: Any) -> dict[str, Any]:
    return {"checkpoint": Path("c"), "name": "n", "add_special_token": [], "add_token": []} | given


def test_the_command_line_wins_and_adds_its_tokens_to_the_files(tmp_path: Path) -> None:
    path = write(
        tmp_path, task="fill-mask", seed=3, add_special_tokens={"[A]": "mean:start"}, add_tokens={"b": "zeros"}
    )
    more = AddedToken(token="[C]", initializer="random")
    request = build_request(arguments(seed=5, add_special_token=[more]), read_settings(path))
    assert request.task == "fill-mask"
    assert request.vocabulary.seed == 5
    assert request.vocabulary.added_tokens == (
        AddedToken(token="[A]", initializer="mean:start"),
        AddedToken(token="b", initializer="zeros", special=False),
        more,
    )
    assert build_request(arguments(), {}).repository.name == "model_repository"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"taks": "reward"}, "has the unknown option taks: .*; did you mean task."),
        ({"task": "chess"}, "task in .* is unknown: expected one of feature-extraction, .*, got chess."),
        ({"seed": True}, "seed in .* is of another kind: expected int, got True."),
        ({"top_k": 0}, "top_k in .* is too small: expected at least 1, got 0."),
        ({"add_tokens": {"a": 1}}, "add_tokens in .* is of another kind: expected tokens and initializers"),
    ],
)
def test_a_setting_that_means_nothing_is_refused(content: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=sentence):
        read_settings(write(tmp_path, **content))


def test_a_file_that_is_no_json_object_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[")
    with pytest.raises(SettingsError, match="cannot be read"):
        read_settings(tmp_path / "x.json")
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(SettingsError, match="holds no options: expected an object, got list"):
        read_settings(tmp_path / "x.json")
