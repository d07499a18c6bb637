import io
import json
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file, save_model

from export.checkpoints import open_checkpoint
from export.checkpoints.storage import safetensors_file
from export.errors import CheckpointError


def make_state() -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    return {
        "embed.weight": torch.randn(7, 3),
        "norm.weight": torch.randn(3).to(torch.bfloat16),
        "mask": torch.tensor([[True], [False]]),
        "count": torch.tensor(4),
    }


def save_shards(folder: Path, suffix: str) -> None:
    state = make_state()
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    weight_map = {}
    for index, names in enumerate((["embed.weight", "mask"], ["norm.weight", "count"])):
        shard = f"{stem}-{index + 1:05d}-of-00002.{suffix}"
        part = {name: state[name] for name in names}
        weight_map.update(dict.fromkeys(names, shard))
        if suffix == "safetensors":
            save_file(part, folder / shard, metadata={"format": "pt"})
        else:
            torch.save(part, folder / shard)
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def save_safetensors(folder: Path, header: Any, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


def assert_is(folder: Path, format_name: str) -> None:
    checkpoint = open_checkpoint(folder)
    assert checkpoint.format_name == format_name
    assert checkpoint.specs().keys() == make_state().keys()
    for name, tensor in make_state().items():
        assert checkpoint.read(name).dtype == tensor.dtype
        assert torch.equal(checkpoint.read(name), tensor)


def test_safetensors_in_one_file_and_in_shards(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    save_file(make_state(), tmp_path / "one" / "model.safetensors")
    save_shards(tmp_path / "two", "safetensors")
    assert_is(tmp_path / "one", "Hugging Face safetensors, 1 file")
    assert_is(tmp_path / "two", "Hugging Face safetensors, 2 files")


def test_bin_in_one_file_and_in_shards(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    torch.save(make_state(), tmp_path / "one" / "pytorch_model.bin")
    save_shards(tmp_path / "two", "bin")
    assert_is(tmp_path / "one", "Hugging Face torch .bin, 1 file")
    assert_is(tmp_path / "two", "Hugging Face torch .bin, 2 files")


def test_safetensors_are_preferred_where_both_lie(tmp_path: Path) -> None:
    save_file(make_state(), tmp_path / "model.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"not looked at")
    assert_is(tmp_path, "Hugging Face safetensors, 1 file")


def test_a_missing_shard_and_a_shard_of_another_save_are_refused(tmp_path: Path) -> None:
    save_shards(tmp_path, "safetensors")
    save_file({"embed.weight": torch.ones(2), "else": torch.ones(2)}, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError, match="expected its 2 tensors, got the file without mask and with else; copy"):
        open_checkpoint(tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"lacks a shard that its index names: expected model-00001-of-00002\.safe"
    ):
        open_checkpoint(tmp_path)


def test_an_index_that_leads_outside_is_refused(tmp_path: Path) -> None:
    index = {"weight_map": {"w": "../model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"leads outside the folder: .* got '\.\./model\.safetensors'"):
        open_checkpoint(tmp_path)


def test_an_index_with_a_byte_order_mark_is_refused_with_a_remedy_that_helps(tmp_path: Path) -> None:
    save_shards(tmp_path, "safetensors")
    path = tmp_path / "model.safetensors.index.json"
    plain = path.read_text()
    path.write_text(plain, encoding="utf-8-sig")
    with pytest.raises(CheckpointError, match="a byte order mark in front.; save it as UTF-8 without a byte order"):
        open_checkpoint(tmp_path)
    path.write_text(plain)
    assert_is(tmp_path, "Hugging Face safetensors, 2 files")


@pytest.mark.parametrize("text", ["", "{}", '{"weight_map": {}}', '{"weight_map": 3}', "[" * 100_000])
def test_an_index_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json cannot be read: expected an index that names the file of"):
        open_checkpoint(tmp_path)


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "data", "sentence"),
    [
        (b"", b"", "cannot be read"),
        (b"[]", b"", "the header is not a JSON object"),
        (b'{"a": ' + b"[" * 100_000, b"", "cannot be read"),
        ({"w": ENTRY}, bytes(7), "7 bytes of data where the header describes 8"),
        ({"w": ENTRY}, bytes(9), "9 bytes of data where the header describes 8"),
        ({"w": {**ENTRY, "shape": [3]}}, bytes(8), r"w of shape \[3\] in 8 bytes"),
        ({"w": {**ENTRY, "shape": [-2]}}, bytes(8), "w has no proper shape"),
        ({"w": {**ENTRY, "data_offsets": [8, 0]}}, bytes(8), r"w of shape \[2\] in -8 bytes"),
        ({"w": {"dtype": "F32"}}, bytes(8), "the entry of w: 'shape'"),
        ({"w": {**ENTRY, "dtype": "F4"}}, bytes(8), "has a dtype that is not read: .* got F4; save the checkpoint unq"),
        ({"v": ENTRY, "w": {**ENTRY, "data_offsets": [4, 12]}}, bytes(12), "overlaps another tensor or leaves a gap"),
        (b'{"w": 1, "w": 2}', b"", "a name is given twice"),
    ],
)
def test_a_safetensors_header_that_lies_is_refused(tmp_path: Path, header: Any, data: bytes, sentence: str) -> None:
    save_safetensors(tmp_path, header, data)
    with pytest.raises(CheckpointError, match=sentence):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_what_git_leaves_in_the_place_of_weights_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 9\n")
    with pytest.raises(CheckpointError, match=rf"{name} is a pointer of Git LFS: .* got 64 bytes of text; fetch it by"):
        open_checkpoint(tmp_path)


def test_a_file_without_tensors_is_refused(tmp_path: Path) -> None:
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="holds no tensors: expected weights, got none"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("header", "found"),
    [
        ({"w": {**ENTRY, "shape": [1] * 64 + [2]}}, "the entry of w: w has no proper shape"),
        (
            {str(n): 0 for n in range(200_001)},
            "has more tensors than are read of one file: expected at most 200000, got 200001; save",
        ),
    ],
    ids=["dimensions", "entries"],
)
def test_a_header_larger_than_any_model_is_refused(tmp_path: Path, header: Any, found: str) -> None:
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    with pytest.raises(CheckpointError, match=re.escape(found)):
        open_checkpoint(tmp_path)


def test_a_header_of_too_many_entries_is_refused_before_it_is_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = {f"w{n}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(200_010)}
    text = json.dumps(entries).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    parsed = []
    monkeypatch.setattr(safetensors_file, "parse_json", lambda *args, **options: parsed.append(args))
    with pytest.raises(CheckpointError, match="expected at most 200000, got 200010; save it in several files"):
        open_checkpoint(tmp_path)
    assert parsed == []


def test_a_header_as_long_as_safetensors_itself_takes_it_is_read(tmp_path: Path) -> None:
    state = {str(n) + "x" * 4_000: torch.ones(1) for n in range(10_000)}
    save_file(state, tmp_path / "model.safetensors")
    assert load_file(tmp_path / "model.safetensors").keys() == open_checkpoint(tmp_path).specs().keys() == state.keys()


def test_a_header_beyond_the_formats_limit_is_told_from_a_file_that_is_cut_off(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", 100_000_001))
        file.truncate(8 + 100_000_001)
    with pytest.raises(CheckpointError, match="longer than the format allows: expected at most 100000000 bytes, got"):
        open_checkpoint(tmp_path)
    with pytest.raises(SafetensorError, match="header too large"):
        load_file(tmp_path / "model.safetensors")


def test_a_header_longer_than_the_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 8 + b"{}")
    with pytest.raises(CheckpointError, match="a header of 18446744073709551615 bytes"):
        open_checkpoint(tmp_path)


def test_non_finite_weights_are_refused_when_read(tmp_path: Path) -> None:
    save_file({"w": torch.tensor([1.0, float("inf")]), "v": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"are NaN or infinite: w: expected finite numbers, got 1 elements"):
        open_checkpoint(tmp_path).read("v")
    assert torch.equal(open_checkpoint(tmp_path, allow_non_finite=True).read("v"), torch.ones(2))


def test_a_link_out_of_the_folder_is_refused_but_the_download_cache_is_not(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "models--x" / "blobs", tmp_path / "models--x" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    save_file(make_state(), blobs / "0123")
    (snapshot / "model.safetensors").symlink_to(Path("../../blobs/0123"))
    assert_is(snapshot, "Hugging Face safetensors, 1 file")
    other = tmp_path / "other"
    other.mkdir()
    (other / "model.safetensors").symlink_to(blobs / "0123")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is a link that leads outside"):
        open_checkpoint(other)


def test_a_bin_with_other_values_than_tensors_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "note": "x"}, tmp_path / "pytorch_model.bin")
    with pytest.raises(
        CheckpointError, match="is not a state dict: expected a dict of tensors, got a dict with other values"
    ):
        open_checkpoint(tmp_path)
    torch.save([1], tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="is not a state dict: expected a dict of tensors, got list"):
        open_checkpoint(tmp_path)


def test_extra_state_in_a_bin_is_left_out(tmp_path: Path) -> None:
    # Transformer Engine's modules keep such a buffer.
    torch.save({**make_state(), "norm._extra_state": io.BytesIO(b"x")}, tmp_path / "pytorch_model.bin")
    assert_is(tmp_path, "Hugging Face torch .bin, 1 file")


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(3, 3, bias=False)
        self.b = torch.nn.Linear(3, 3, bias=False)
        self.b.weight = self.a.weight


def test_the_tied_names_that_safetensors_itself_leaves_out_are_read(tmp_path: Path) -> None:
    model = Tied()
    save_model(model, str(tmp_path / "model.safetensors"))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.tied == {"b.weight": "a.weight"}
    assert checkpoint.specs().keys() == model.state_dict().keys()
    assert torch.equal(checkpoint.read("b.weight"), model.a.weight)


def test_metadata_that_names_no_tensor_is_no_tied_name(tmp_path: Path) -> None:
    state = {"pt": torch.ones(2), "a": torch.zeros(2)}
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt", "a": "pt", "title": "a model"})
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.specs().keys() == state.keys()
    assert checkpoint.tied == {}


@pytest.mark.parametrize("text", ["", "a b", "{}", "[1]", "[" * 100_000])
def test_a_record_of_zero_size_parameters_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    save_file(make_state(), tmp_path / "model.safetensors", metadata={"zero_size_parameters": text})
    with pytest.raises(
        CheckpointError, match="cannot be read: expected a JSON list of names under zero_size_parameters"
    ):
        open_checkpoint(tmp_path)


def test_no_tag_is_taken(tmp_path: Path) -> None:
    save_file(make_state(), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="has no tags: expected a DeepSpeed checkpoint with --tag"):
        open_checkpoint(tmp_path, tag="global_step1")


def test_a_folder_that_is_no_checkpoint_is_refused_with_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    (tmp_path / "checkpoint-5").mkdir()
    with pytest.raises(CheckpointError) as refusal:
        open_checkpoint(tmp_path)
    assert str(refusal.value) == (
        f"{tmp_path} holds no checkpoint: expected one of model.safetensors, model.safetensors.index.json, "
        "pytorch_model.bin, pytorch_model.bin.index.json, index.json, DeepSpeed's latest and *_model_states.pt, "
        "Megatron-LM's iter_*/mp_rank_*/model_optim_rng.pt, torch.distributed.checkpoint's .metadata, "
        "or FSDP's pytorch_model_fsdp*, "
        f"one *.pth, *.pt, *.ckpt or *.pkl, got checkpoint-5{os.sep}, notes.txt; pass one of checkpoint-5{os.sep}."
    )
    for step in range(7, 12):
        (tmp_path / f"checkpoint-{step}").mkdir()
    (tmp_path / "others").mkdir()
    (tmp_path / "runs").mkdir()
    names = ", ".join(f"checkpoint-{step}{os.sep}" for step in (10, 11, 5, 7, 8, 9))
    with pytest.raises(
        CheckpointError, match=rf"got {names}, notes\.txt, others{os.sep}, \+1 more; pass one of {names}\."
    ):
        open_checkpoint(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"there is no checkpoint folder .*: expected a folder, got nothing; pass"
    ):
        open_checkpoint(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("file", "title", "way"),
    [
        (
            "model.gguf",
            "llama.cpp (GGUF)",
            "gguf_file='model.gguf') in transformers, with gguf and accelerate installed",
        ),
        ("tf_model.h5", "TensorFlow", "from_tf=True) in transformers 4, with tensorflow installed"),
        ("flax_model.msgpack", "Flax", "from_flax=True) in transformers 4, with flax installed"),
    ],
)
def test_weights_of_another_library_are_refused_with_the_way_to_torch(
    file: str, title: str, way: str, tmp_path: Path
) -> None:
    (tmp_path / file).touch()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError) as refusal:
        open_checkpoint(tmp_path)
    assert str(refusal.value) == (
        f"{tmp_path} holds weights of {title} alone: expected weights of torch, such as model.safetensors, got {file}; "
        f"load them by from_pretrained(FOLDER, {way}, save that by save_pretrained, and pass its folder."
    )
    save_file(make_state(), tmp_path / "model.safetensors")
    assert open_checkpoint(tmp_path).specs()


def test_a_models_id_on_the_hub_is_told_how_to_be_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("sentence-transformers/all-MiniLM-L6-v2", "bert-base-uncased"):
        with pytest.raises(CheckpointError, match="expected a folder, got nothing; pass the folder") as refusal:
            open_checkpoint(Path(name))
        command = f"hf download {name} --local-dir {Path(name).name}"
        assert str(refusal.value).endswith(f"is first fetched: {command}.")
        # The client that transformers brings with it takes exactly these arguments.
        parsed = subprocess.run(
            [Path(sys.executable).with_name("hf"), *command.split()[1:], "--help"], capture_output=True, check=False
        )
        assert parsed.returncode == 0
    # Paths that cannot be an id, or whose folder is there.
    (tmp_path / "runs").mkdir()
    for path in ("runs/last", "a/b/c", str(tmp_path / "x"), "../x"):
        with pytest.raises(CheckpointError, match="got nothing; pass the folder that holds the weights\\."):
            open_checkpoint(Path(path))


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_accelerates_index_of_a_model_too_big_for_one_file_is_read(tmp_path: Path, suffix: str) -> None:
    # Accelerate's documentation of big models: `index.json` is the map alone, and the shards have any names.
    save_shards(tmp_path, suffix)
    (index_file,) = tmp_path.glob("*.index.json")
    index = json.loads(index_file.read_text())["weight_map"]
    renamed = dict(zip(sorted(set(index.values())), ("first_state_dict", "second_state_dict"), strict=True))
    for old, new in renamed.items():
        (tmp_path / old).rename(tmp_path / f"{new}.{suffix}")
    index_file.unlink()
    plain = {name: f"{renamed[file]}.{suffix}" for name, file in index.items()}
    (tmp_path / "index.json").write_text(json.dumps(plain))
    kind = "safetensors" if suffix == "safetensors" else "torch .bin"
    assert_is(tmp_path, f"Hugging Face {kind}, 2 files")
    (tmp_path / f"second_state_dict.{suffix}").unlink()
    with pytest.raises(CheckpointError, match="lacks a shard that its index names: expected second_state_dict"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize("text", ["", "[[[", '{"weight": "first_state_'])
def test_a_damaged_index_of_accelerates_is_named(tmp_path: Path, suffix: str, text: str) -> None:
    for name in ("first_state_dict", "second_state_dict"):
        (tmp_path / f"{name}.{suffix}").write_bytes(b"")
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(
        CheckpointError,
        match=rf"index.json cannot be read: expected an index that names .* got {len(text)} bytes .*; copy the checkpo",
    ):
        open_checkpoint(tmp_path)
    # Of something else, where the weights do not need it.
    torch.save(make_state(), tmp_path / "model.pt")
    assert open_checkpoint(tmp_path).format_name == "torch file model.pt"


@pytest.mark.parametrize("target", ["../blobs/gone", "model.safetensors"])
def test_a_link_that_leads_nowhere_is_named(tmp_path: Path, target: str) -> None:
    """As a cache of downloads leaves it, where the folder is copied without what its links lead to."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").symlink_to(target)
    link = tmp_path / "model.safetensors"
    sentence = f"{link} is a link that leads nowhere: expected a file behind it, got a link to {target}"
    with pytest.raises(CheckpointError, match=re.escape(sentence)):
        open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    with pytest.raises(CheckpointError, match=re.escape(sentence)):
        open_checkpoint(tmp_path)


def test_a_json_file_of_something_else_is_no_index(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text('{"pages": 3}')
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        open_checkpoint(tmp_path)


def test_one_safetensors_file_of_any_name_is_read_alone_and_in_its_folder(tmp_path: Path) -> None:
    save_file(make_state(), tmp_path / "my_state.safetensors")
    assert_is(tmp_path, "Hugging Face safetensors, 1 file")
    assert_is(tmp_path / "my_state.safetensors", "Hugging Face safetensors, 1 file")
    # One that is one of several is not a model, nor is an adapter or an optimizer.
    for name in ("model-00001-of-00002.safetensors", "adapter_model.safetensors", "optimizer.safetensors"):
        (tmp_path / "my_state.safetensors").rename(tmp_path / name)
        with pytest.raises(CheckpointError, match="holds no checkpoint|lacks shards of its model"):
            open_checkpoint(tmp_path)
        (tmp_path / name).rename(tmp_path / "my_state.safetensors")
    # Beside a file by `torch.save` that may be the model, it is not chosen.
    torch.save(make_state(), tmp_path / "model.pt")
    assert open_checkpoint(tmp_path).format_name == "torch file model.pt"


def test_the_real_checkpoint_is_read_bit_for_bit(checkpoint: Path) -> None:
    opened = open_checkpoint(checkpoint)
    expected = load_file(checkpoint / "model.safetensors")
    assert opened.specs().keys() == expected.keys()
    assert all(torch.equal(opened.read(name), tensor) for name, tensor in expected.items())


def move_shards(folder: Path, places: list[str]) -> None:
    """Move the shards to `places`, and have the index say so."""
    path = folder / "model.safetensors.index.json"
    weight_map = json.loads(path.read_text())["weight_map"]
    for shard, place in zip(sorted(set(weight_map.values())), places, strict=True):
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / shard).rename(folder / place)
        weight_map = {name: place if found == shard else found for name, found in weight_map.items()}
    path.write_text(json.dumps({"weight_map": weight_map}))


def test_shards_in_folders_within_are_read_and_links_and_paths_out_of_it_are_not(tmp_path: Path) -> None:
    inside, linked, absolute = (tmp_path / name for name in ("inside", "linked", "absolute"))
    for folder, places in (
        (inside, ["part a/x.safetensors", "part b/x.safetensors"]),
        (linked, ["part/x.safetensors", "y.safetensors"]),
        (absolute, [f"{tmp_path}/x.safetensors", "y.safetensors"]),
    ):
        folder.mkdir()
        save_shards(folder, "safetensors")
        move_shards(folder, places)
    assert_is(inside, "Hugging Face safetensors, 2 files")
    (linked / "part").rename(tmp_path / "outside")
    (linked / "part").symlink_to(tmp_path / "outside")
    with pytest.raises(CheckpointError, match=r"part/x\.safetensors is a link that leads outside"):
        open_checkpoint(linked)
    with pytest.raises(CheckpointError, match="the index in .* leads outside the folder"):
        open_checkpoint(absolute)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_shards_without_their_index_are_read_where_all_are_there(tmp_path: Path, suffix: str) -> None:
    save_shards(tmp_path, suffix)
    (index,) = tmp_path.glob("*.index.json")
    index.unlink()
    assert_is(tmp_path, f"Hugging Face {'safetensors' if suffix == 'safetensors' else 'torch .bin'}, 2 files")
    assert open_checkpoint(tmp_path).facts.missing == ("the index, which shows that all shards are of one save",)
    first, second = sorted(tmp_path.glob(f"*.{suffix}"))
    kept = second.read_bytes()
    shutil.copy(first, second)
    with pytest.raises(CheckpointError, match=r"shard before it has as well: .*got embed.weight, mask; copy the index"):
        open_checkpoint(tmp_path)
    second.write_bytes(kept)
    first.unlink()
    with pytest.raises(CheckpointError, match=rf"lacks shards of its model: expected {first.name}, got 1 of 2, and no"):
        open_checkpoint(tmp_path)


def test_an_adapter_alone_is_told_from_a_model_and_names_the_one_it_changes(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "someone/base"}))
    save_file(make_state(), tmp_path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError) as refusal:
        open_checkpoint(tmp_path)
    assert str(refusal.value) == (
        f"{tmp_path} holds an adapter, which is not a whole model: expected the model that it changes, someone/base, "
        f"got adapter_config.json; pass that model in its place, and to run this folder as well: --adapter {tmp_path}."
    )


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "model.safetensors.index.json"])
def test_weights_that_are_no_regular_file_are_refused_as_that(name: str, tmp_path: Path) -> None:
    for make, kind in ((os.mkfifo, "a FIFO"), (lambda path: path.symlink_to("/dev/zero"), "a device")):
        make(tmp_path / name)
        with pytest.raises(CheckpointError, match=rf"{name} is not a regular file: expected a file, got {kind}; put"):
            open_checkpoint(tmp_path)
        (tmp_path / name).unlink()


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "other.safetensors.index.json"])
def test_other_weights_do_not_replace_those_behind_a_link_to_nothing(name: str, tmp_path: Path) -> None:
    torch.save(make_state(), tmp_path / "pytorch_model.bin")
    if name.startswith("other"):
        (tmp_path / "pytorch_model.bin").unlink()
        save_file(make_state(), tmp_path / "state-00001-of-00001.safetensors")
    (tmp_path / name).symlink_to("../blobs/gone")
    with pytest.raises(
        CheckpointError, match=rf"{name} is a link that leads nowhere: expected a file behind it, got a"
    ):
        open_checkpoint(tmp_path)
