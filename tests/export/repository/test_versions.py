"""The verbs on what is published: list, compare, switch, prune, remove, verify, promote; and being killed in each."""

import hashlib
import itertools
import json
import os
import re
import shlex
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from failing_disk import FAILURES, NEVER, kill, refuse_calls, run_forked
from harness import Exported, Finished, fingerprint
from repositories import is_consistent, make_other, publish_files
from stranger import DRIPS, answering, dripping

from export.commands import waiting
from export.commands.verb import choose_next
from export.commands.waiting import wait_until_served
from export.errors import RepositoryError, ServingError
from export.repository.activation import activate
from export.repository.contents import find_active_version, list_models, list_versions
from export.repository.integrity import Finding, find_damage
from export.repository.promotion import promote
from export.repository.retirement import prune, remove_model
from export.repository.use import use

NAME = "sentence_embedding"


@pytest.fixture
def models(two_versions: Path, tmp_path: Path) -> Path:
    """Return a copy of two versions that a test may change; hard links are copies in it."""
    return Path(shutil.copytree(two_versions, tmp_path / "models"))


def ask(export_cli: Callable[..., Finished], *words: object) -> dict[str, object]:
    done = export_cli(*map(str, words), "--json")
    assert done.code == 0, done.err
    content: dict[str, object] = json.loads(done.out)
    return content


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


@pytest.mark.parametrize(
    "address", ["1", "localhost", "localhost:", ":8003", "localhost:0", "[::1", "ftp://a:1", "a b:1"]
)
def test_an_address_without_a_port_is_refused_before_anything_is_activated(
    address: str, models: Path, export_cli: Callable[..., Finished]
) -> None:
    done = export_cli("activate", "tickets", "--repository", str(models), "--wait", "localhost:19299", address)
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert "--wait cannot be used: expected HOST:PORT of a server's status port" in done.err
    assert f"got {address!r}; correct it, or write what else belongs" in done.err
    assert find_active_version(models, "tickets") == 1


def test_a_port_that_answers_in_another_protocol_is_refused_in_a_sentence(models: Path) -> None:
    with socket.create_server(("localhost", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 10)
                connection.sendall(bytes(9))

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ServingError, match="cannot be asked for it: expected the status port of a running server"):
            wait_until_served(f"localhost:{listener.getsockname()[1]}", "tickets", 1, print)
        thread.join()


def test_a_version_that_another_activation_overtakes_is_waited_for_no_longer(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "_SETTLING_S", 0)
    told = [{"active": active, "served": 1, "state": "rolling", "reason": ""} for active in (2, 1, 2, 1)]
    answers = [json.dumps({"follows": True, "models": {"tickets": each}}) for each in told]
    # For a moment it is told of as it was, and then for good.
    with answering(*answers) as address, pytest.raises(ServingError) as caught:
        wait_until_served(address, "tickets", 2, print)
    assert str(caught.value) == (
        "version 2 of tickets is not waited for any more: expected it to stay the active one, got version 1; activate "
        "it again."
    )


def test_a_server_of_another_repository_does_not_count_for_the_number_of_its_version(
    models: Path, monkeypatch: pytest.MonkeyPatch, export_cli: Callable[..., Finished]
) -> None:
    monkeypatch.setattr(waiting, "_NOTICE_S", 0.3)
    served = {"active": 2, "served": 2, "state": "served", "reason": ""}
    answers = [json.dumps({"follows": True, "models": {"tickets": served | {"golden": end * 64}}}) for end in "ab"]
    with answering(*answers) as address:
        wait_until_served(address, "tickets", 2, print, "b" * 64)
    with answering(answers[0]) as address, pytest.raises(ServingError) as caught:
        wait_until_served(address, "tickets", 2, print, "b" * 64)
    assert str(caught.value) == (
        f"version 2 of tickets is active in the repository, and the server at {address} takes no notice: expected "
        "version 2 as the active one within 0.3 s, got a version 2 with other recorded answers; pass the status port "
        "of a server of this repository."
    )
    # As its publication has it, and as a launcher of an earlier release, which does not say.
    golden = hashlib.sha256(Path(models, "tickets", "2", "golden.json").read_bytes()).hexdigest()
    for told in (served | {"golden": golden}, served):
        with answering(json.dumps({"follows": True, "models": {"tickets": told}})) as address:
            done = export_cli(
                "activate", "tickets", "2", "--repository", f"{models}/../{models.name}", "--wait", address
            )
            assert done.code == 0, done.err


WRONG_REASON = '{"models": {"tickets": {"active": 1, "served": 0, "state": "rolling", "reason": 5}}}'


@pytest.mark.parametrize(
    "answer",
    [
        *("", "{}", "[]", '{"models": {"tickets": {}}}', '{"models": {"tickets": 5}}', '{"models": {"tickets": null}}'),
        WRONG_REASON,
    ],
)
def test_a_program_that_answers_in_the_place_of_a_status_port_is_refused_in_a_sentence(
    models: Path, answer: str
) -> None:
    with answering(answer) as address, pytest.raises(ServingError, match="cannot be asked for it") as caught:
        wait_until_served(address, "tickets", 1, print)
    assert f"a running server, got {repr(answer[:100]) if answer else 'nothing'}; pass its address" in str(caught.value)


@pytest.mark.parametrize(("beginning", "drop"), DRIPS)
def test_a_program_that_drips_in_the_place_of_a_status_port_is_not_waited_for(
    beginning: bytes, drop: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "_TIMEOUT_S", 0.3)
    with dripping(beginning, drop) as address, pytest.raises(ServingError, match="cannot be asked for it") as caught:
        wait_until_served(address, "tickets", 1, print)
    assert "expected the status port of a running server, got 'timed out'; pass its address" in str(caught.value)


@pytest.mark.parametrize("length", ["", f"Content-Length: {10**15}\r\n"])
def test_a_program_that_floods_in_the_place_of_a_status_port_is_not_read_on(
    length: str,
) -> None:
    beginning = f"HTTP/1.1 200 OK\r\n{length}\r\n".encode()
    with dripping(beginning, bytes(1 << 20)) as address, pytest.raises(ServingError) as caught:
        wait_until_served(address, "tickets", 1, print)
    # The one or the other comes first, by how fast this machine is.
    assert re.search("a running server, got '(an answer of more than 268435456 bytes|timed out)'", str(caught.value))


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


def test_an_empty_folder_of_somebody_elses_is_no_step_of_a_model_that_is_not_there(
    models: Path, export_cli: Callable[..., Finished]
) -> None:
    (models / "other_model").mkdir()
    done = export_cli("remove", "other", "--repository", str(models))
    assert done.code == 1 and "holds no model other of modelyard's" in done.err
    assert (models / "other_model").is_dir()


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


@pytest.mark.parametrize("damage", ["garbage", "missing"])
@pytest.mark.parametrize("part", ["tickets_model", "tickets_preprocess"])
def test_a_configuration_that_was_lost_is_found_and_mended_and_the_model_can_be_removed(
    part: str, damage: str, models: Path, export_cli: Callable[..., Finished]
) -> None:
    here = ("--repository", str(models))
    config = models / part / "config.pbtxt"
    before = config.read_text()
    config.unlink()
    if damage == "garbage":
        config.write_text("garbage {")
    what = {"garbage": "is no Triton model configuration", "missing": "is missing"}[damage]
    done = export_cli("verify-repository", *here)
    assert done.code == 1
    assert done.out.splitlines()[:-1] == [f"tickets: {config} {what}; activate version 1 again."]
    assert len(ask(export_cli, "versions", "list", *here)["versions"]) == 2
    assert ask(export_cli, "activate", "tickets", 1, *here)["outcome"] == "activated"
    assert config.read_text() == before
    assert list(find_damage(models)) == []
    config.unlink()
    assert ask(export_cli, "remove", "tickets", *here)["versions"] == [1, 2]
    assert list(models.iterdir()) == []


@pytest.mark.parametrize("damage", ["garbage", "missing"])
def test_the_configuration_of_a_model_itself_that_was_lost_is_written_by_an_activation(
    damage: str, models: Path, export_cli: Callable[..., Finished]
) -> None:
    here = ("--repository", str(models))
    config = models / "tickets" / "config.pbtxt"
    before = config.read_text()
    config.unlink()
    if damage == "garbage":
        config.write_text("garbage {")
        assert (
            "config.pbtxt is no Triton model configuration; move it away" in export_cli("verify-repository", *here).out
        )
        refused = export_cli("activate", "tickets", "1", *here)
        assert refused.code == 1
        assert refused.err.endswith('"garbage"; move this file out of the repository, then do it again.\n')
        config.unlink()
    assert f"{config} is missing; activate a version." in export_cli("verify-repository", *here).out
    assert ask(export_cli, "activate", "tickets", 1, *here)["before"] == 0
    assert config.read_text() == before
    assert list(find_damage(models)) == []


@pytest.mark.parametrize("part", ["tickets", "tickets_model"])
@pytest.mark.parametrize(("make", "kind"), [(Path.mkdir, "a folder"), (os.mkfifo, "a pipe, a socket or a device")])
def test_what_is_no_file_in_the_place_of_a_configuration_is_to_be_moved_away(
    part: str,
    make: Callable[[Path], None],
    kind: str,
    models: Path,
    tmp_path: Path,
    export_cli: Callable[..., Finished],
) -> None:
    here = ("--repository", str(models))
    config = models / part / "config.pbtxt"
    before = config.read_text()
    config.unlink()
    make(config)
    done = export_cli("verify-repository", *here)
    assert done.code == 1
    assert f"tickets: {config} is " in done.out and "; move it away, then activate " in done.out
    refused = export_cli("activate", "tickets", "1", *here)
    assert refused.code == 1
    assert refused.err == (
        f"error: {config} is {kind}: expected a Triton model configuration, or nothing, got {kind}; move it out of "
        "the repository, then do it again.\n"
    )
    if part == "tickets":
        assert export_cli("versions", "list", *here).err == refused.err
    config.rename(tmp_path / "moved")
    assert export_cli("activate", "tickets", "1", *here).code == 0
    assert config.read_text() == before


@pytest.mark.parametrize("file", ["modelyard.lock.json", "SHA256SUMS", "publication.json", "verification.json"])
def test_nobody_waits_for_a_pipe_among_the_files_of_a_version(
    file: str, models: Path, export_cli: Callable[..., Finished]
) -> None:
    here = ("--repository", str(models))
    path = models / "tickets" / "2" / file
    path.unlink()
    for make, kind in (
        (os.mkfifo, "a pipe, a socket or a device"),
        (lambda path: path.symlink_to("/dev/zero"), "a pipe, a socket or a device"),
        (lambda path: path.symlink_to(path), "a link that leads to itself"),
    ):
        make(path)
        done = export_cli("verify-repository", *here)
        assert done.code == 1 and f"{path} is {kind}; move it away, and " in done.out
        assert "is missing" not in done.out
        assert export_cli("versions", "list", *here).code == 0
        export_cli("versions", "show", "tickets", "2", *here)
        assert export_cli("versions", "diff", "tickets", "1", "2", *here).code == 0
        refused = export_cli("activate", "tickets", "2", *here)
        assert refused.code == 1 or file == "SHA256SUMS"
        assert export_cli("activate", "tickets", "1", *here).code == 0
        path.unlink()


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: (path.unlink(), path.symlink_to("gone"))])
def test_a_version_without_its_sums_is_not_as_it_was_published(
    damage: Callable[[Path], object], models: Path, export_cli: Callable[..., Finished]
) -> None:
    here = ("--repository", str(models))
    folder = models / "tickets" / "2"
    damage(folder / "SHA256SUMS")
    (folder / "golden.json").unlink()
    done = export_cli("verify-repository", *here)
    assert done.code == 1
    for name in ("SHA256SUMS", "golden.json"):
        assert f"{folder / name} is missing; restore it, or export again." in done.out
    assert export_cli("activate", "tickets", "2", *here).code == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda told: b"",
        lambda told: told[:-5],
        lambda told: told[:100],
        lambda told: b"\xef\xbb\xbf" + told,
        lambda told: b"\xff\xfe\0\1",
    ],
)
def test_sums_that_are_cut_or_no_sums_are_named_and_nothing_else(
    damage: Callable[[bytes], bytes], models: Path, export_cli: Callable[..., Finished]
) -> None:
    sums = models / "tickets" / "2" / "SHA256SUMS"
    told = sums.read_bytes()
    sums.unlink()
    sums.write_bytes(damage(told))
    done = export_cli("verify-repository", "--repository", str(models))
    assert done.code == 1
    assert f"{sums} is cut or damaged; restore it, or export again." in done.out
    assert "was not published" not in done.out and "lacks" not in done.out
    # As `sha256sum --binary` writes them, and an editor of another system ends their lines.
    sums.write_bytes(told.replace(b"  ", b" *").replace(b"\n", b"\r\n"))
    assert export_cli("verify-repository", "--repository", str(models)).code == 0


@pytest.mark.parametrize(
    "path", ["../../../../etc/passwd", "/etc/passwd", "../../tickets/1/golden.json", "../2/.", ".."]
)
def test_sums_that_lead_out_of_the_version_are_named(
    path: str, models: Path, export_cli: Callable[..., Finished]
) -> None:
    sums = models / "tickets" / "2" / "SHA256SUMS"
    with sums.open("a") as file:
        file.write(f"{'0' * 64}  {path}\n")
    done = export_cli("verify-repository", "--repository", str(models))
    assert done.code == 1
    assert f"{sums} names what is no file of this version ({path}); restore it, or export again." in done.out
    refused = export_cli("activate", "tickets", "2", "--repository", str(models))
    assert refused.code == 1 and f"which names what is no file of this version ({path})" in refused.err


@pytest.mark.parametrize("path", ["./../1/golden.json", "configs/../../1/golden.json", "./../../../outside"])
def test_a_right_sum_of_what_is_no_file_of_the_version_passes_as_little(
    path: str, models: Path, export_cli: Callable[..., Finished]
) -> None:
    version = models / "tickets" / "2"
    (models.parent / "outside").write_text("x")
    own = version / "golden.json"
    with (version / "SHA256SUMS").open("a") as file:
        # Spelt otherwise, it is the version's own file all the same.
        file.write(f"{hashlib.sha256(own.read_bytes()).hexdigest()}  ./../2/golden.json\n")
    assert export_cli("verify-repository", "--repository", str(models)).code == 0
    with (version / "SHA256SUMS").open("a") as file:
        file.write(f"{hashlib.sha256((version / path).read_bytes()).hexdigest()}  {path}\n")
    done = export_cli("verify-repository", "--repository", str(models))
    assert done.code == 1
    assert f"SHA256SUMS names what is no file of this version ({path}); restore it, or export again." in done.out


def test_a_file_that_the_sums_no_longer_name_is_told_as_just_that(
    models: Path, export_cli: Callable[..., Finished]
) -> None:
    sums = models / "tickets" / "2" / "SHA256SUMS"
    lines = sums.read_text().splitlines(keepends=True)
    sums.write_text("".join(line for line in lines if "model.onnx" not in line))
    done = export_cli("verify-repository", "--repository", str(models))
    assert done.code == 1 and f"{sums} does not name model.onnx, which the lock does; restore it" in done.out
    assert "lacks" not in done.out


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


def test_verify_repository_finds_a_model_that_was_renamed_by_hand_and_its_orphaned_steps(models: Path) -> None:
    (models / "tickets").rename(models / "moved")
    assert [str(finding) for finding in find_damage(models)] == [
        f"tickets: {models / 'moved'} is a part of the model tickets, and {models / 'tickets'} is not there; "
        "rename it to tickets or remove it.",
        *(
            f"tickets: {models / step} is a part of the model tickets, and {models / 'tickets'} is not there; "
            f"bring {models / 'tickets'} back or remove the folder."
            for step in ("tickets_model", "tickets_preprocess")
        ),
    ]
    (models / "moved").rename(models / "tickets")
    assert list(find_damage(models)) == []


def test_verify_repository_finds_what_is_missing_new_or_another_configuration(
    models: Path, export_cli: Callable[..., Finished]
) -> None:
    assert ask(export_cli, "verify-repository", "--repository", models)["findings"] == []
    (models / "tickets" / "1" / "golden.json").unlink()
    (models / "tickets_model" / "1" / "model.onnx.bak").write_bytes(b"")
    shutil.copy(models / "tickets" / "2" / "configs" / "tickets_model.pbtxt", models / "tickets_model" / "config.pbtxt")
    done = export_cli("verify-repository", "--repository", str(models), "--json")
    found = {Path(each["path"]).name: each["what"] for each in json.loads(done.out)["findings"]}
    assert done.code == 1
    assert found == {
        "golden.json": "is missing",
        "model.onnx.bak": "was not published",
        "config.pbtxt": "is not the one of version 1, which is active",
    }


@pytest.mark.parametrize(
    "make",
    [os.mkfifo, *(partial(os.symlink, place) for place in ("/dev/zero", "/dev", "nowhere"))],
    ids=["pipe", "link to a device", "link to a folder", "link to nothing"],
)
def test_verify_repository_finds_what_is_no_file_and_was_not_published(
    make: Callable[[Path], None], models: Path
) -> None:
    strange = [
        *(models / "tickets_model" / "1" / name for name in ("SHA256SUMS", "weights")),
        models / "tickets" / "1" / "configs" / "more",
    ]
    for path in strange:
        make(path)
    found = sorted(str(finding) for finding in find_damage(models))
    assert found == [f"version 1 of tickets: {path} was not published; move it away." for path in sorted(strange)]
    with pytest.raises(RepositoryError, match="which was not published, and 2 more of its files"):
        activate(models, "tickets", 1)


def test_verify_repository_hashes_what_a_link_to_a_folder_leads_to(models: Path, tmp_path: Path) -> None:
    configs = models / "tickets" / "2" / "configs"
    configs.rename(tmp_path / "moved")
    configs.symlink_to(tmp_path / "moved")
    assert list(find_damage(models)) == []
    with (configs / "tickets.pbtxt").open("a") as file:
        file.write("\n")
    assert [str(finding) for finding in find_damage(models)] == [
        f"version 2 of tickets: {configs / 'tickets.pbtxt'} has changed; restore it, or export again."
    ]


@pytest.mark.parametrize(("names", "got"), [((), "an empty folder"), (("one", "two"), "one, two")])
def test_verify_repository_refuses_a_folder_without_a_model(
    names: tuple[str, ...], got: str, tmp_path: Path, export_cli: Callable[..., Finished]
) -> None:
    here = tmp_path / "here"
    for name in ("", *names):
        (here / name).mkdir()
    done = export_cli("verify-repository", "--repository", str(here))
    assert (done.code, done.out, done.err) == (
        1,
        "",
        f"error: {here} holds no models of modelyard's: expected a repository that `run` or `promote` published into, "
        f"got {got}; pass --repository.\n",
    )


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
        ("promote", "killed", 83),
        ("activate", "the disk is full", 41),
        ("remove", "it is mounted anew without the right to write", 41),
        ("remove", "removing fails", 17),
        ("prune", "removing fails", 17),
        ("remove", "renaming fails", 5),
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
@pytest.mark.parametrize(("what", "gone", "call"), [("remove", NAME, 4), ("prune", f"old versions of {NAME}", 1)])
def test_a_removal_that_leaves_something_says_so(
    what: str, gone: str, call: int, exported: Exported, disk: Path
) -> None:
    repository = disk / "models"
    publish_files(exported, repository)
    publish_files(make_other(exported, disk / "files"), repository)
    told = (
        rf"{gone} (is|are) gone from {repository}, but some of the files stay there: got Input/output error for \S+; "
        rf"mend the disk or correct the permissions, then `{what} {NAME}` again takes them away\."
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
