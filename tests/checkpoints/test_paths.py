import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from trainers.zero_checkpoints import find_checkpoint

from export.checkpoints import open_checkpoint
from export.checkpoints.pickles.torch_zip import open_torch_zip, read_bare_pickle
from export.checkpoints.storage.paths import (
    MAX_JSON_BYTES,
    check_inside,
    open_regular,
    read_json,
    read_json_beside,
    read_small,
)
from export.checkpoints.storage.safetensors_file import read_safetensors
from export.checkpoints.storage.zip_archive import ZipArchive
from export.errors import CheckpointError

KINDS: dict[str, Callable[[Path], None]] = {
    "a FIFO": os.mkfifo,
    "a socket": lambda path: os.mknod(path, stat.S_IFSOCK | 0o600),
    # Ends at once, as others never do.
    "a device": lambda path: path.symlink_to(os.devnull),
    "a folder": Path.mkdir,
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_regular_file_is_refused_before_a_byte_is_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "config.json"
    KINDS[kind](path)
    for read in (open_regular, read_json, read_json_beside):
        with pytest.raises(CheckpointError) as refusal:
            read(path)
        sentence = f"{path} is not a regular file: expected a file, got {kind}; put the file itself there."
        assert str(refusal.value) == sentence


def test_small_files_are_read_whole_up_to_their_limit(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(10))
    assert read_small(tmp_path / "x", max_bytes=10) == bytes(10)
    with pytest.raises(CheckpointError, match=r"x is too large: expected at most 9 bytes, got 10; copy the checkpoint"):
        read_small(tmp_path / "x", max_bytes=9)
    with pytest.raises(CheckpointError, match=r"y cannot be opened: expected a file, got No such file or directory\."):
        read_small(tmp_path / "y", max_bytes=9)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (b"{", "1 bytes (Expecting property name"),
        (b"\xff", "1 bytes ('utf-8' codec"),
        (b"\xef\xbb\xbf{}", "(a byte order mark in front); save it as UTF-8 without a byte order mark"),
        ('{"a": 1}'.encode("utf-16"), "in position 0: invalid start byte); save it as UTF-8 without a byte order mark"),
        (b"[" * 100_000, "100000 bytes (values nested too deeply)"),
        (b"[0" + b",0" * 4_000_000 + b"]", "8000003 bytes (more than 4000000 values)"),
    ],
)
def test_json_that_is_none_or_would_fill_the_memory_is_refused(tmp_path: Path, text: bytes, found: str) -> None:
    (tmp_path / "x.json").write_bytes(text)
    with pytest.raises(CheckpointError, match="cannot be read: expected JSON, got ") as refusal:
        read_json(tmp_path / "x.json")
    assert found in str(refusal.value)
    assert read_json_beside(tmp_path / "x.json") == {}


def test_nothing_beside_the_weights_says_nothing_and_a_link_to_nothing_is_refused(tmp_path: Path) -> None:
    assert read_json_beside(tmp_path / "config.json") == {}
    (tmp_path / "config.json").symlink_to("gone.json")
    with pytest.raises(CheckpointError, match="config.json cannot be opened"):
        read_json_beside(tmp_path / "config.json")


def save_sharded(folder: Path) -> None:
    for number in (1, 2):
        save_file({f"w{number}": torch.ones(2)}, folder / f"model-{number}.safetensors")
    weight_map = {f"w{number}": f"model-{number}.safetensors" for number in (1, 2)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    "name", ["model.safetensors.index.json", "config.json", "trainer_state.json"], ids=["index", "config", "state"]
)
def test_a_sparse_file_of_gigabytes_beside_the_weights_is_refused(tmp_path: Path, name: str) -> None:
    save_sharded(tmp_path)
    (tmp_path / name).touch()
    os.truncate(tmp_path / name, 3 << 30)
    with pytest.raises(
        CheckpointError, match=rf"{name} is too large: expected at most {MAX_JSON_BYTES} bytes, got {3 << 30}"
    ):
        open_checkpoint(tmp_path)


def test_a_fifo_in_place_of_a_weight_file_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(find_checkpoint("z2_bf16"), folder)
    path = next(folder.glob("*/*_optim_states.pt"))
    path.unlink()
    os.mkfifo(path)
    for read in (open_torch_zip, ZipArchive, read_bare_pickle, read_safetensors):
        with pytest.raises(CheckpointError, match="is not a regular file: expected a file, got a FIFO"):
            read(path)
    with pytest.raises(CheckpointError, match="is not a regular file: expected a file, got a FIFO"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["latest", "--tag", "index"])
def test_a_name_longer_than_any_file_system_takes_is_refused(tmp_path: Path, name: str) -> None:
    long = "n" * 256
    if name == "index":
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": long}}))
    else:
        (tmp_path / "latest").write_text(long)
    with pytest.raises(CheckpointError, match="cannot be read: .*, got File name too long") as refusal:
        open_checkpoint(tmp_path, tag=long if name == "--tag" else None)
    assert str(tmp_path) in str(refusal.value)


@pytest.mark.parametrize("name", ["x.pt", "model.safetensors", "latest", "config.json"])
def test_a_link_to_itself_is_refused(tmp_path: Path, name: str) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to(name)
    with pytest.raises(CheckpointError, match="leads nowhere: expected a file in the checkpoint, got "):
        check_inside(tmp_path / name, tmp_path)
    if name == "config.json":
        with pytest.raises(CheckpointError, match=r"config\.json cannot be opened"):
            open_checkpoint(tmp_path)


@pytest.mark.parametrize("family", ["torch", "safetensors"])
def test_names_that_are_no_text_are_refused(tmp_path: Path, family: str) -> None:
    if family == "torch":
        torch.save({"a\ud800": torch.ones(2)}, tmp_path / "x.pt")
    else:
        header = json.dumps({"a\ud800": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
        (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(CheckpointError) as refusal:
        open_checkpoint(tmp_path)
    assert "holds tensors whose names are not text: a\\ud800: expected names in Unicode" in str(refusal.value)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("gone")])
def test_the_name_of_the_latest_save_is_not_passed_over_where_it_cannot_be_read(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(find_checkpoint("z2_bf16"), tmp_path / "checkpoint"))
    (folder / "latest").unlink()
    make(folder / "latest")
    with pytest.raises(CheckpointError, match="latest (is not a regular file|cannot be opened): expected a file, got"):
        open_checkpoint(folder)
    # A link of one's own to the folder of the latest save is no such file.
    (folder / "latest").unlink()
    (folder / "latest").symlink_to(next(path.parent.name for path in folder.glob("*/*_optim_states.pt")))
    with pytest.raises(CheckpointError, match="holds several DeepSpeed checkpoints and no file latest"):
        open_checkpoint(folder)


# What is no file, and what is said of it.
IRREGULAR = [
    *((KINDS[kind], f"is not a regular file: expected a file, got {kind}; put") for kind in ("a FIFO", "a socket")),
    (lambda path: path.symlink_to("gone"), "(is a link that leads nowhere|cannot be opened): expected a file"),
]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("make", "said"), IRREGULAR, ids=["FIFO", "socket", "link"])
@pytest.mark.parametrize(
    "name",
    [
        "pytorch_model_fsdp.bin",
        "pytorch_model_fsdp_rank0.bin",
        "shard-00001-model-00001-of-00001.safetensors",
        ".metadata",
        "__0_0.distcp",
        "iter_0000500/mp_rank_00/model_optim_rng.pt",
        "model.ckpt",
        "model.pkl",
        "model-00001-of-00002.safetensors",
    ],
)
def test_weights_that_are_no_file_are_not_passed_over_in_any_format(
    name: str, make: Callable[[Path], None], said: str, tmp_path: Path
) -> None:
    if name == "__0_0.distcp":
        dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
        (tmp_path / name).unlink()
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    make(tmp_path / name)
    with pytest.raises(CheckpointError, match=rf"{name} {said}"):
        open_checkpoint(tmp_path)
    if Path(name).suffix in (".bin", ".ckpt", ".safetensors"):
        with pytest.raises(CheckpointError, match=rf"{name} {said}"):
            open_checkpoint(tmp_path / name)


@pytest.mark.parametrize(("make", "said"), IRREGULAR, ids=["FIFO", "socket", "link"])
def test_a_shard_of_an_index_that_is_no_file_is_refused_as_that(
    make: Callable[[Path], None], said: str, tmp_path: Path
) -> None:
    save_sharded(tmp_path)
    (tmp_path / "model-2.safetensors").unlink()
    make(tmp_path / "model-2.safetensors")
    with pytest.raises(CheckpointError, match=rf"model-2.safetensors {said}"):
        open_checkpoint(tmp_path)


def test_other_weights_do_not_replace_those_that_are_no_file(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "old.pt")
    (tmp_path / "last.ckpt").symlink_to("gone")
    with pytest.raises(CheckpointError, match=r"several files that may be the model: .* got last\.ckpt, old\.pt; pass"):
        open_checkpoint(tmp_path)
    (tmp_path / "last.ckpt").rename(tmp_path / "pytorch_model_fsdp_0")
    with pytest.raises(CheckpointError, match=r"pytorch_model_fsdp_0 is a link that leads nowhere: "):
        open_checkpoint(tmp_path)
