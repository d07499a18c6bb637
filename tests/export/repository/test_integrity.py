"""What `verify-repository` finds, and how what it found is mended."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from harness import Finished
from repositories import ask

from export.errors import RepositoryError
from export.repository.activation import activate
from export.repository.integrity import find_damage


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


def test_what_lies_beside_the_versions_is_found(models: Path) -> None:
    (models / "tickets_model" / "9").mkdir()
    (models / "tickets" / "notes.txt").touch()
    found = {finding.path: (finding.what, finding.remedy) for finding in find_damage(models)}
    others = [models / "tickets_model" / "9", models / "tickets" / "notes.txt"]
    assert found == dict.fromkeys(others, ("was not published", "move it away"))
    # A change is under way, or was killed, and ends with what it has begun.
    (models / "tickets" / "staging-9-0123abcd").mkdir()
    assert not list(find_damage(models))


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
