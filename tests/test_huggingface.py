import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from export.checkpoints import TensorSpec, open_checkpoint
from export.errors import CheckpointError


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {
        "a.weight": torch.randn(3, 5),
        "b.bias": torch.randn(4).to(torch.bfloat16),
        "c.mask": torch.tensor([True, False]),
        "d.count": torch.tensor(7),
    }


def write_single_safetensors(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, directory / "model.safetensors")


def write_sharded_safetensors(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    shards = {"model-00001-of-00002.safetensors": ["a.weight"], "model-00002-of-00002.safetensors": list(tensors)[1:]}
    for shard, names in shards.items():
        save_file({name: tensors[name] for name in names}, directory / shard)
    index = {"metadata": {}, "weight_map": {name: shard for shard, names in shards.items() for name in names}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def write_single_bin(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    torch.save(tensors, directory / "pytorch_model.bin")


def write_sharded_bin(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    shards = {"pytorch_model-00001-of-00002.bin": ["a.weight"], "pytorch_model-00002-of-00002.bin": list(tensors)[1:]}
    for shard, names in shards.items():
        torch.save({name: tensors[name] for name in names}, directory / shard)
    index = {"weight_map": {name: shard for shard, names in shards.items() for name in names}}
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    "write", [write_single_safetensors, write_sharded_safetensors, write_single_bin, write_sharded_bin]
)
def test_every_layout_gives_the_saved_tensors_bit_for_bit(
    write: Callable[[Path, dict[str, torch.Tensor]], None], tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    write(tmp_path, tensors)
    checkpoint = open_checkpoint(tmp_path)
    assert dict(checkpoint.specs()) == {
        name: TensorSpec(shape=tuple(tensor.shape), dtype=tensor.dtype) for name, tensor in tensors.items()
    }
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.read(name), tensor)
        assert checkpoint.read(name).dtype == tensor.dtype


def test_the_real_checkpoint_is_read_bit_for_bit(checkpoint: Path) -> None:
    opened = open_checkpoint(checkpoint)
    assert opened.format_name == "Hugging Face safetensors, 1 file"
    expected = load_file(checkpoint / "model.safetensors")
    assert opened.specs().keys() == expected.keys()
    assert all(torch.equal(opened.read(name), tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("write", [write_single_safetensors, write_single_bin])
@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_a_truncated_file_is_refused_by_name(
    write: Callable[[Path, dict[str, torch.Tensor]], None], keep: int, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    write(tmp_path, tensors)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=path.name):
        open_checkpoint(tmp_path)


class Hostile:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (Path("executed"),)  # type: ignore[return-value]


def test_a_hostile_pickle_is_refused_and_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"weight": Hostile()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        open_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        open_checkpoint(tmp_path)
    assert not Path("executed").exists()


def test_an_index_that_leads_outside_the_folder_is_refused(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    write_sharded_safetensors(tmp_path, tensors)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a.weight": "../elsewhere.safetensors"}}))
    with pytest.raises(CheckpointError, match="leads outside the folder"):
        open_checkpoint(tmp_path)


def test_a_missing_shard_is_refused_by_name(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    write_sharded_safetensors(tmp_path, tensors)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"expected model-00002-of-00002\.safetensors, got no such file"):
        open_checkpoint(tmp_path)


def test_swapped_shards_are_refused(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    write_sharded_safetensors(tmp_path, tensors)
    first, second = sorted(tmp_path.glob("model-*.safetensors"))
    shutil.move(first, tmp_path / "aside")
    shutil.move(second, first)
    shutil.move(tmp_path / "aside", second)
    with pytest.raises(CheckpointError, match="is not the shard that the index describes"):
        open_checkpoint(tmp_path)


def test_a_folder_without_weights_is_refused_with_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(CheckpointError, match=r"expected one of model\.safetensors.*got notes\.txt"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="expected a folder, got nothing"):
        open_checkpoint(tmp_path / "missing")
