"""The verbs on what is published: list, compare, switch, prune, verify, promote."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import Finished, fingerprint
from repositories import ask

from export.commands.verb import choose_next
from export.repository.use import use


def test_versions_are_listed_shown_and_compared(models: Path, export_cli: Callable[..., Finished]) -> None:
    here = ("--repository", models)
    one, two = ask(export_cli, "versions", "list", *here)["versions"]
    assert (one["version"], one["active"], two["version"], two["active"]) == (1, True, 2, False)
    assert (one["task"], one["precision"], one["target"]) == ("feature-extraction", "fp32", "24.10")
    assert one["published"] <= two["published"] and one["published"].endswith("+00:00")
    assert Path(two["checkpoint"]).name == "other" and 0 < two["worst"]["max_abs_error"] < 1e-5
    table = export_cli("versions", "list", "tickets", *map(str, here)).out.splitlines()
    assert table[1].split()[:3] == ["tickets", "1", "active"] and table[2].split()[1] == "2" and len(table) == 3
    found = ask(export_cli, "versions", "diff", "tickets", 1, 2, *here)["differences"]
    assert [item["what"] for item in found["weights"]] == ["checkpoint/model.safetensors", "model.onnx"]
    assert (found["tokenizer"], found["options"], found["tools"]) == ([], [], [])
    assert ask(export_cli, "versions", "show", "tickets", 2, *here)["files"]["tickets_model/2/model.onnx"] > 1000
    assert "has no version 0: expected one of" in export_cli("versions", "show", "tickets", "0", *map(str, here)).err
    done = export_cli("versions", "show", "tickets", "7", *map(str, here))
    assert (done.code, done.err) == (
        1,
        f"error: tickets in {models} has no version 7: expected one of 1, 2, got 7; see `versions list`.\n",
    )


def test_activation_goes_forth_and_back_and_refuses_what_is_damaged(
    models: Path, export_cli: Callable[..., Finished]
) -> None:
    here = ("--repository", str(models))
    before = fingerprint(models)
    assert "version 2 is active, version 1 before" in export_cli("activate", "tickets", *here).out
    assert "version 2 was active already" in export_cli("activate", "tickets", "2", *here).out
    assert "version 1 is active, version 2 before" in export_cli("activate", "tickets", "1", *here).out
    assert "tickets in " in (none := export_cli("activate", "tickets", "0", *here)).err and none.code == 1
    assert fingerprint(models) == before
    graph = models / "tickets_model" / "2" / "model.onnx"
    graph.write_bytes(graph.read_bytes()[:-1] + b"x")
    done = export_cli("activate", "tickets", "2", *here)
    assert done.code == 1 and f"got {graph}, which has changed" in done.err
    assert fingerprint(models).items() - before.items() == {
        (path, digest) for path, digest in fingerprint(models).items() if path.endswith("2/model.onnx")
    }
    done = export_cli("verify-repository", *here)
    assert done.code == 1
    assert done.out == (
        f"version 2 of tickets: {graph} has changed; restore it, or export again.\n2 versions: 1 finding\n"
    )


def test_the_next_step_can_be_typed_where_a_path_has_a_space(
    models: Path, tmp_path: Path, export_cli: Callable[..., Finished]
) -> None:
    here, there = models.rename(tmp_path / "my $models"), tmp_path / "it's there"
    for words, said in (
        (("activate", "tickets", "2"), ("-m", "server", "check", "--repository", str(here))),
        (("promote", "tickets", "1", "--to", str(there)), ("-m", "server", "check", "--repository", str(there))),
        (
            ("promote", "tickets", "2", "--to", str(there), "--no-activate"),
            ("-m", "export", "activate", "tickets", "2", "--repository", str(there)),
        ),
    ):
        done = export_cli(*words, "--repository", str(here))
        assert done.code == 0, done.err
        assert shlex.split(done.out.splitlines()[-1]) == ["Next:", "python", *said]


def test_a_path_goes_up_from_where_a_link_leads(
    models: Path, tmp_path: Path, export_cli: Callable[..., Finished]
) -> None:
    """What is left of a path where `link/..` is taken out of it may be another repository, or none."""
    (deep := tmp_path / "there" / "deep").mkdir(parents=True)
    models.rename(deep.parent / "models")
    (tmp_path / "link").symlink_to(deep)
    other = tmp_path / "other"
    for repository in (f"{tmp_path}/link/../models", f"{deep}/../models"):
        here = ("--repository", repository)
        for version in (2, 1):
            assert ask(export_cli, "activate", "tickets", version, *here)["outcome"] == "activated"
        assert export_cli("verify-repository", *here).code == 0
        assert ask(export_cli, "promote", "tickets", "1", "--to", f"{deep}/../../other", *here)["version"] == 1
        assert ask(export_cli, "promote", "tickets", "1", "--to", other, *here)["outcome"] == "unchanged"
        checked = export_cli("verify-repository", "--repository", f"{deep}/../../other")
        assert checked.code == 0, checked.out


@pytest.mark.parametrize("content", ["[[[", "[" * 100_000, "{}", '{"model": 1}'])
def test_versions_are_compared_whatever_became_of_a_tokenizer(
    content: str, models: Path, export_cli: Callable[..., Finished]
) -> None:
    (path,) = models.glob("*/2/tokenizer.json")
    path.write_text(content)
    done = export_cli("versions", "diff", "tickets", "1", "2", "--repository", str(models))
    assert (done.code, done.err) == (0, "")


@pytest.mark.parametrize("content", ["", "# a comment\n", f"# {'#' * (1 << 20)}\n"])
def test_an_empty_or_endless_configuration_names_no_active_version(
    content: str, models: Path, export_cli: Callable[..., Finished]
) -> None:
    here = ("--repository", str(models))
    config = models / "tickets" / "config.pbtxt"
    config.write_text(content + config.read_text() if len(content) > 1000 else content)
    damage = f"{config} is no Triton model configuration; move it away, then activate a version"
    assert damage in export_cli("verify-repository", *here).out
    refused = export_cli("versions", "list", *here)
    assert refused.code == 1 and f"{config} cannot be read: expected a Triton model configuration" in refused.err


def test_of_a_precision_that_is_judged_by_agreement_the_least_is_told(
    models: Path, export_cli: Callable[..., Finished]
) -> None:
    here = ("--repository", str(models))
    path = models / "tickets" / "2" / "verification.json"
    report = json.loads(path.read_text())
    cosine = min(case["min_cosine"] for case in report["cases"])
    path.write_text(json.dumps(report | {"tolerances": {"min_cosine": 0.99}}))
    assert f"cosine {cosine:.7g}  " in export_cli("versions", "list", *here).out.splitlines()[2]
    assert f"at worst cosine {cosine:.7g}" in export_cli("versions", "show", "tickets", "2", *here).out
    quality = ask(export_cli, "versions", "diff", "tickets", 1, 2, *here)["differences"]["quality"]
    assert all(item["after"] != "-" for item in quality if item["what"].startswith("worst"))


def test_the_worst_and_the_cases_of_a_version_are_those_that_were_judged(
    models: Path, export_cli: Callable[..., Finished]
) -> None:
    here = ("--repository", str(models))
    path = models / "tickets" / "2" / "verification.json"
    report = json.loads(path.read_text())
    # As of int8: what no client sends was tried, and is no reason to refuse it.
    padded = report["cases"][0] | {"name": "padded left", "min_cosine": 0.9, "max_abs_error": 0.5, "passed": True}
    path.write_text(json.dumps(report | {"cases": [*report["cases"], padded], "tolerances": {"min_cosine": 0.99}}))
    worst = {
        key: (min if key == "min_cosine" else max)(case[key] for case in report["cases"])
        for key in ("min_cosine", "max_abs_error")
    }
    count, told = len(report["cases"]), f"cosine {worst['min_cosine']:.7g}"
    assert f"{told}  " in export_cli("versions", "list", *here).out.splitlines()[2]
    shown = export_cli("versions", "show", "tickets", "2", *here).out
    assert f"{count} cases, at worst {told}\n" in shown
    for listed in (
        ask(export_cli, "versions", "list", *here)["versions"][1],
        ask(export_cli, "versions", "show", "tickets", 2, *here),
    ):
        assert listed["cases"] == count and listed["worst"].items() >= worst.items()
    quality = ask(export_cli, "versions", "diff", "tickets", 1, 2, *here)["differences"]["quality"]
    assert not {"cases", "worst cosine"} & {item["what"] for item in quality}
    assert f"{count} cases, all passed" in export_cli("inspect", str(models / "tickets")).out.split("version 2")[1]


def test_prune_keeps_the_active_version_and_one_that_is_used(models: Path, export_cli: Callable[..., Finished]) -> None:
    here = ("--repository", models)
    with use(models / "tickets" / "2"):
        (kept,) = ask(export_cli, "prune", "--keep", 0, *here)["models"]
    assert (kept["versions"], kept["kept"], kept["in_use"]) == ([], [1, 2], [2])
    (pruned,) = ask(export_cli, "prune", "tickets", "--keep", 0, *here)["models"]
    assert (pruned["versions"], pruned["kept"], pruned["in_use"]) == ([2], [1], [])
    assert pruned["freed_bytes"] > 1e6
    assert ask(export_cli, "verify-repository", *here)["findings"] == []
    assert ask(export_cli, "remove", "tickets", *here)["versions"] == [1]
    assert list(models.iterdir()) == []


def test_an_empty_folder_with_a_number_is_no_version(models: Path, export_cli: Callable[..., Finished]) -> None:
    here = ("--repository", models)
    empty = models / "tickets" / "3"
    empty.mkdir()
    done = export_cli("verify-repository", *map(str, here))
    assert done.out.splitlines()[:-1] == [
        f"tickets: {empty} is an empty folder; move it away, or restore what it held."
    ]
    (pruned,) = ask(export_cli, "prune", "--keep", 2, *here)["models"]
    assert (pruned["versions"], pruned["kept"]) == ([], [1, 2])
    assert ask(export_cli, "activate", "tickets", *here)["version"] == 2
    (pruned,) = ask(export_cli, "prune", "--keep", 1, *here)["models"]
    assert (pruned["versions"], pruned["kept"]) == ([1], [2])
    assert empty.is_dir()


@pytest.mark.parametrize("lost", ["config.pbtxt", "1"])
def test_what_is_active_and_not_known_is_not_pruned(
    lost: str, models: Path, tmp_path: Path, export_cli: Callable[..., Finished]
) -> None:
    (models / "tickets" / lost).rename(tmp_path / lost)
    before = fingerprint(models)
    done = export_cli("prune", "tickets", "--keep", "0", "--repository", str(models))
    assert done.code == 1 and "it is not known which version of tickets is active: expected a config.pbtxt" in done.err
    assert "make a version active with `activate tickets N` first" in done.err
    assert fingerprint(models) == before
    assert ask(export_cli, "activate", "tickets", 2, "--repository", models)["version"] == 2
    (pruned,) = ask(export_cli, "prune", "--keep", 0, "--repository", models)["models"]
    assert pruned["kept"] == [2]


def test_a_model_with_somebody_elses_file_in_it_is_not_removed(
    models: Path, tmp_path: Path, export_cli: Callable[..., Finished]
) -> None:
    stranger = models / "tickets_model" / ".DS_Store"
    stranger.touch()
    before = fingerprint(models)
    done = export_cli("remove", "tickets", "--repository", str(models))
    assert done.code == 1 and "the folders of tickets hold something else as well: expected the versions" in done.err
    assert f"got {stranger}; move it away" in done.err
    assert fingerprint(models) == before
    stranger.unlink()
    (models / "tickets").rename(models / "renamed")
    before = fingerprint(models)
    done = export_cli("remove", "tickets", "--repository", str(models))
    assert done.code == 1 and "give tickets its name back if it was renamed, and `remove tickets` again" in done.err
    assert fingerprint(models) == before
    (models / "renamed").rename(models / "tickets")
    assert ask(export_cli, "remove", "tickets", "--repository", models)["versions"] == [1, 2]
    assert list(models.iterdir()) == []


def test_the_next_step_is_to_check_where_a_server_follows_the_repository(models: Path) -> None:
    new, other = (models / "tickets" / number for number in ("2", "1"))
    assert choose_next(models, new) == "serve"
    with use(new):
        assert choose_next(models, new) == "serve", "a server that comes to use it is not in the way"
        assert choose_next(models, other) == "check"


def test_promotion_copies_the_proof_keeps_the_number_and_is_done_once(
    models: Path, tmp_path: Path, export_cli: Callable[..., Finished]
) -> None:
    for place in (models, models / "tickets", tmp_path):
        done = export_cli("promote", "tickets", "--repository", str(models), "--to", str(place))
        assert done.code == 1 and "expected another repository, neither inside of this one nor around it" in done.err
    (tmp_path / "loop").symlink_to("loop")
    done = export_cli("promote", "tickets", "--repository", str(models), "--to", str(tmp_path / "loop"))
    assert done.code == 1 and "loop cannot be a repository: expected a folder, or a place for one" in done.err
    words = ("promote", "tickets", 2, "--repository", models, "--to", tmp_path / "production")
    assert ask(export_cli, *words, "--no-activate") == {
        "name": "tickets",
        "source": 2,
        "version": 2,
        "active": 0,
        "outcome": "created",
    }
    done = ask(export_cli, *words)
    assert (done["version"], done["active"], done["outcome"]) == (2, 2, "switched")
    assert ask(export_cli, *words)["outcome"] == "unchanged"
    # A number that is not higher than those that are there is not free.
    assert ask(export_cli, "promote", "tickets", *words[3:])["version"] == 3
    assert ask(export_cli, "verify-repository", "--repository", tmp_path / "production")["findings"] == []
    for file in ("golden.json", "verification.json", "modelyard.lock.json"):
        copied = tmp_path / "production" / "tickets" / "3" / file
        assert copied.read_bytes() == (models / "tickets" / "1" / file).read_bytes()
    (models / "tickets" / "1" / "golden.json").write_text("{}")
    refused = export_cli(*map(str, ("promote", "tickets", *words[3:])))
    assert refused.code == 1 and "golden.json, which has changed" in refused.err
