"""The readers of FSDP and torch.distributed.checkpoint, on checkpoints that real FSDP ranks left."""

from __future__ import annotations

import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness import CHECKOUT
from nodes import spread_over_nodes
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint._extension import StreamTransformExtension
from torch.distributed.checkpoint.filesystem import SerializationFormat
from transformers import GPT2Config

from export.checkpoints import StoredCheckpoint, join_folders, open_checkpoint
from export.checkpoints.fsdp import reader as fsdp
from export.checkpoints.fsdp.dcp_metadata import read_metadata
from export.checkpoints.pickles.torch_zip import open_torch_zip
from export.checkpoints.storage.assembled_tensor import Box, assemble, transpose
from export.checkpoints.storage.dtypes import FLOAT32
from export.checkpoints.storage.stored_tensor import ContiguousTensor, StoredTensor
from export.consolidation.consolidate import consolidate
from export.errors import CheckpointError

Truth = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders `w2` and `w4`, each with all that ranks of that number saved."""
    out = tmp_path_factory.mktemp("fsdp")
    for world_size in (2, 4):
        script = CHECKOUT / "tests" / "trainers" / "train_fsdp.py"
        subprocess.run([sys.executable, script, out / f"w{world_size}", str(world_size)], check=True, timeout=300)
    return out


def read_truth(folder: Path) -> Truth:
    return torch.load(folder.parent / f"{folder.name}.truth.pt", weights_only=True)


def assert_equal(checkpoint: StoredCheckpoint, truth: Truth) -> None:
    specs = checkpoint.specs()
    assert sorted(specs) == sorted(truth)
    for name, tensor in truth.items():
        found = checkpoint.read(name)
        assert found.dtype == tensor.dtype == specs[name].dtype
        assert tuple(found.shape) == tuple(tensor.shape) == specs[name].shape
        assert torch.equal(found, tensor), name


def refusal(action: Callable[[], Any]) -> str:
    with pytest.raises(CheckpointError) as caught:
        action()
    return str(caught.value)


def copy(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


READ_ALIKE = [
    *(
        "w2/dcp_raw",
        "w2/dcp_alone",
        "w2/dcp_files",
        "w2/dcp_app",
        "w2/dcp_opt",
        "w2/dcp_hf",
        "w2/dcp_hf_files",
        "w2/rank_files",
        "w2/verl",
    ),
    *("w2/bf16_dcp", "w2/bf16_rank_files", "w2/bf16_hf", "w2/columns_dcp", "w2/columns_rank_files"),
    *("w2/fsdp1_dcp", "w2/fsdp1_rank_files", "w2/local", "w2/accelerate_full", "w2/accelerate_sharded"),
    *(
        "w4/dcp_raw",
        "w4/dcp_alone",
        "w4/dcp_app",
        "w4/dcp_opt",
        "w4/dcp_hf",
        "w4/dcp_hf_files",
        "w4/rank_files",
        "w4/verl",
    ),
    *("w4/columns_dcp", "w4/columns_rank_files", "w4/hybrid_dcp", "w4/hybrid_rank_files"),
    *("w4/grid_dcp", "w4/grid_rank_files", "w4/hybrid_lowest"),
    # Statistics of BatchNorm differ between ranks: they are rank 0's, as its truth is.
    *("w2/statistics", "w4/statistics"),
    *("w2/holder_full", "w2/holder_sharded", "w2/compiled_dcp", "w2/compiled_rank_files", "w2/local_untied"),
]


@pytest.mark.parametrize("variant", READ_ALIKE)
def test_every_format_gives_the_live_ranks_state_dict_bit_for_bit(trained: Path, variant: str) -> None:
    assert_equal(open_checkpoint(trained / variant), read_truth(trained / variant))


@pytest.mark.parametrize("variant", ["w2/dcp_app", "w4/grid_dcp", "w4/columns_rank_files", "w2/accelerate_sharded"])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_consolidate_streams_every_way_of_sharding(
    trained: Path, tmp_path: Path, variant: str, dtype: str | None
) -> None:
    consolidate(trained / variant, tmp_path / "out", dtype=dtype)
    written = load_file(tmp_path / "out/model.safetensors")
    truth = read_truth(trained / variant)
    assert sorted(written) == sorted(truth)
    for name, tensor in truth.items():
        cast = tensor.to(torch.bfloat16) if dtype and tensor.is_floating_point() else tensor
        assert torch.equal(written[name], cast), name


@pytest.mark.parametrize("variant", ["w4/dcp_raw", "w4/dcp_alone", "w2/rank_files", "w2/verl"])
def test_the_folders_of_all_nodes_are_one_checkpoint(trained: Path, variant: str, tmp_path: Path) -> None:
    nodes = spread_over_nodes(trained / variant, tmp_path)
    assert_equal(open_checkpoint(join_folders(nodes)), read_truth(trained / variant))
    with pytest.raises(CheckpointError, match=r"lacks files .*: pass every node's folder as an argument of its own"):
        open_checkpoint(nodes[0])


@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_the_trainers_own_checkpoint_is_read_bit_for_bit_and_told_its_step(trained: Path, kind: str) -> None:
    checkpoint = open_checkpoint(trained / f"w2/trainer_{kind}/checkpoint-2")
    assert_equal(checkpoint, read_truth(trained / f"w2/trainer_{kind}"))
    assert (checkpoint.facts.world_size, checkpoint.facts.step) == (2, 2)


def test_accelerates_ddp_folder_is_read_as_hugging_face(trained: Path) -> None:
    truth = read_truth(trained / "w2/accelerate_ddp")
    # Accelerate leaves the second name of a tied weight out of safetensors.
    del truth["lm_head.weight"]
    assert_equal(open_checkpoint(trained / "w2/accelerate_ddp"), truth)


def test_facts_tell_ranks_and_step(trained: Path) -> None:
    app = open_checkpoint(trained / "w4/dcp_app")
    assert (app.facts.world_size, app.facts.step) == (4, 2)
    assert app.format_name == "torch.distributed.checkpoint, 4 files"
    assert open_checkpoint(trained / "w2/accelerate_full").facts.world_size == 2
    assert open_checkpoint(trained / "w4/verl").facts.world_size == 4
    # Two of the ranks had nothing to save, which their empty files show.
    lowest = open_checkpoint(trained / "w4/hybrid_lowest")
    assert (lowest.facts.world_size, lowest.format_name) == (4, "torch.distributed.checkpoint, 2 files")


def test_the_trainers_step_is_found_beside_the_shards(trained: Path, tmp_path: Path) -> None:
    folder = copy(trained / "w2/accelerate_sharded", tmp_path / "checkpoint-7")
    (folder / "trainer_state.json").write_text('{"global_step": 7}')
    (folder / "config.json").write_text("{}")
    for named in (folder, folder / "pytorch_model_fsdp_0"):
        assert open_checkpoint(named).facts.step == 7
        assert open_checkpoint(named).directory == folder


def test_two_parts_that_may_be_the_model_are_refused_until_one_is_chosen(trained: Path) -> None:
    folder = trained / "w2/dcp_ema"
    assert "got ema, model; pass --tag with the part to read" in refusal(lambda: open_checkpoint(folder))
    assert_equal(open_checkpoint(folder, tag="ema"), read_truth(folder))
    assert "expected tensors under teacher" in refusal(lambda: open_checkpoint(folder, tag="teacher"))


@pytest.mark.filterwarnings("ignore")
def test_counters_beside_a_model_at_the_root_are_no_candidates(tmp_path: Path) -> None:
    state = {
        "embed.weight": torch.ones(3, 2),
        "train_state": {"step": torch.tensor(5), "loss": torch.ones(1)},
        "rng": {"cpu": torch.ones(16, dtype=torch.uint8)},
        "optimizer": {"state.embed.weight.exp_avg": torch.ones(3, 2)},
    }
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    assert_equal(open_checkpoint(tmp_path), {"embed.weight": torch.ones(3, 2)})


def test_an_optimizer_alone_is_no_model(trained: Path) -> None:
    assert "holds no model" in refusal(lambda: open_checkpoint(trained / "w2/dcp_moments"))
    assert "holds no model" in refusal(lambda: open_checkpoint(trained / "w2/accelerate_sharded/optimizer_0"))


def test_a_folder_above_the_checkpoint_is_refused_naming_the_right_one(trained: Path, tmp_path: Path) -> None:
    for step in (5, 10):
        copy(trained / "w2/accelerate_sharded", tmp_path / f"checkpoint-{step}")
    message = refusal(lambda: open_checkpoint(tmp_path))
    assert "holds no checkpoint" in message
    assert "pass one of checkpoint-10/, checkpoint-5/" in message


@pytest.mark.filterwarnings("ignore")
def test_the_prefix_of_a_wrapper_is_taken_off_where_every_name_has_it_and_told(tmp_path: Path) -> None:
    state = {"module.a.weight": torch.ones(2), "module.b": torch.ones(0)}
    dcp.save(state, checkpoint_id=tmp_path / "all", no_dist=True)
    (tmp_path / "full").mkdir()
    torch.save(state, tmp_path / "full/pytorch_model_fsdp.bin")
    for folder, kind in (("all", "torch.distributed.checkpoint, 1 file"), ("full", "FSDP full state dict, 1 file")):
        assert_equal(open_checkpoint(tmp_path / folder), {"a.weight": torch.ones(2), "b": torch.ones(0)})
        assert open_checkpoint(tmp_path / folder).format_name == f"{kind}, without prefix module."
    dcp.save({"module.a": torch.ones(2), "b": torch.ones(1)}, checkpoint_id=tmp_path / "one", no_dist=True)
    assert_equal(open_checkpoint(tmp_path / "one"), {"module.a": torch.ones(2), "b": torch.ones(1)})
    assert open_checkpoint(tmp_path / "one").format_name == "torch.distributed.checkpoint, 1 file"


def test_what_torch_compile_put_inside_names_is_taken_off_and_told(trained: Path, tmp_path: Path) -> None:
    assert open_checkpoint(trained / "w2/compiled_dcp").format_name.endswith(", without _orig_mod. inside names")
    state = {"a._orig_mod.w": torch.ones(2), "a.w": torch.ones(2), "my_orig_mod.w": torch.ones(1)}
    torch.save(state, tmp_path / "pytorch_model_fsdp.bin")
    assert "become one without their wrappers' names: expected one tensor under each name, got a._orig_mod.w, a.w" in (
        refusal(lambda: open_checkpoint(tmp_path))
    )
    del state["a.w"]
    torch.save(state, tmp_path / "pytorch_model_fsdp.bin")
    assert sorted(open_checkpoint(tmp_path).tensors) == ["a.w", "my_orig_mod.w"]


@pytest.mark.parametrize("variant", ["holder_full", "holder_sharded"])
def test_a_gathered_copy_is_compared_under_the_names_of_the_shards(trained: Path, tmp_path: Path, variant: str) -> None:
    folder = copy(trained / "w2" / variant, tmp_path / "both")
    truth = read_truth(trained / "w2" / variant)
    # Safetensors refuses two names of one storage, so the tied name is left out.
    gathered = {name: tensor.clone() for name, tensor in truth.items() if name != "model.lm_head.weight"}
    save_file(gathered, folder / "model.safetensors")
    assert_equal(open_checkpoint(folder), truth)
    assert open_checkpoint(folder).facts.missing == ()
    save_file({f"_orig_mod.{name}": tensor for name, tensor in gathered.items()}, folder / "model.safetensors")
    assert_equal(open_checkpoint(folder), truth)
    gathered["model.transformer.wpe.weight"][0, 0] += 1
    for prefix in ("", "_orig_mod."):
        save_file({f"{prefix}{name}": tensor for name, tensor in gathered.items()}, folder / "model.safetensors")
        message = refusal(open_checkpoint(folder).verify)
        assert "model.safetensors on model.transformer.wpe.weight: expected the same" in message


def test_a_gathered_copy_under_other_names_is_told_as_not_compared(trained: Path, tmp_path: Path) -> None:
    folder = copy(trained / "w2/holder_full", tmp_path / "both")
    save_file({"transformer.wpe.weight": torch.ones(8, 12)}, folder / "model.safetensors")
    assert open_checkpoint(folder).facts.missing == (
        "a comparison with the gathered copy on transformer.wpe.weight: the shards have no such names",
    )


def test_a_full_state_dict_keeps_parameters_without_elements_and_refuses_anything_else(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model_fsdp.bin"
    state = {"a": torch.ones(2), "empty": torch.ones(0, 4), "a._extra_state": b"no tensor"}
    torch.save(state, path)
    assert_equal(open_checkpoint(tmp_path), {"a": torch.ones(2), "empty": torch.ones(0, 4)})
    torch.save({"model": state}, path)
    assert "is not a full state dict: expected names and tensors, got other values under model" in (
        refusal(lambda: open_checkpoint(tmp_path))
    )
    torch.save({"model": {"a": torch.ones(2), "empty": torch.ones(0, 4)}}, tmp_path / "model.pt")
    assert_equal(open_checkpoint(tmp_path / "model.pt"), {"a": torch.ones(2), "empty": torch.ones(0, 4)})
    torch.save({"a": torch.ones(2), "placeholder": torch.ones(0)}, tmp_path / "model.pt")
    assert "ZeRO stage 3" in refusal(lambda: open_checkpoint(tmp_path / "model.pt"))


def test_rank_files_tell_tied_names(trained: Path, tmp_path: Path) -> None:
    assert open_checkpoint(trained / "w2/rank_files").tied == {"head.weight": "embed.weight"}
    consolidate(trained / "w2/rank_files", tmp_path / "out")
    assert "head.weight" not in load_file(tmp_path / "out/model.safetensors")


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_plain_weight_that_differs_between_ranks_is_refused_by_name(trained: Path, world_size: int) -> None:
    checkpoint = open_checkpoint(trained / f"w{world_size}/ignored")
    message = refusal(checkpoint.verify)
    assert "rank0.bin disagree with the float32 copy in" in message and "rank1.bin on ignored.bias, ignored.weight" in (
        message
    )


def test_a_plain_tensor_of_another_shape_on_another_rank_is_refused(trained: Path, tmp_path: Path) -> None:
    folder = copy(trained / "w2/statistics", tmp_path / "shapes")
    path = folder / "pytorch_model_fsdp_0_rank1.bin"
    state = torch.load(path, weights_only=False)
    state["norm.running_mean"] = torch.zeros(7)
    torch.save(state, path)
    assert "got others in pytorch_model_fsdp_0_rank1.bin: norm.running_mean" in (
        refusal(lambda: open_checkpoint(folder))
    )


@pytest.mark.parametrize("name", ["consolidated.{}.pth", "ckpt-{}-of-2.bin", "rank{}.pt"])
@pytest.mark.parametrize("ranks", ["rank_files", "verl"])
def test_the_files_of_ranks_under_names_of_ones_own_are_read_once_named_as_told(
    ranks: str, name: str, trained: Path, tmp_path: Path
) -> None:
    files = sorted(path for path in (trained / "w2" / ranks).iterdir() if "rank" in path.name)
    for rank, path in enumerate(files):
        shutil.copy(path, tmp_path / name.format(rank))
    message = refusal(lambda: open_checkpoint(tmp_path / name.format(0)))
    assert message == refusal(lambda: open_checkpoint(tmp_path))
    assert message.endswith(
        "; put the files of all ranks into one folder as pytorch_model_fsdp_rankN.bin, N from 0, and pass the folder, "
        "or save the model's full state dict."
    )
    for rank in range(len(files)):
        (tmp_path / name.format(rank)).rename(tmp_path / f"pytorch_model_fsdp_rank{rank}.bin")
    assert_equal(open_checkpoint(tmp_path), read_truth(trained / "w2" / ranks))


def test_rank_files_with_the_state_of_more_than_the_model_are_read(trained: Path, tmp_path: Path) -> None:
    folder = copy(trained / "w2/rank_files", tmp_path / "nested")
    for path in folder.glob("*rank*"):
        torch.save({"epoch": 3, "state_dict": {"model": torch.load(path, weights_only=False)}}, path)
    assert_equal(open_checkpoint(folder), read_truth(trained / "w2/rank_files"))


def test_two_models_by_accelerate_are_refused_naming_both_files(trained: Path) -> None:
    message = refusal(lambda: open_checkpoint(trained / "w2/accelerate_two"))
    assert "holds several models" in message and "got model.safetensors, model_1.safetensors; copy the one" in message


def test_verls_configuration_is_found_in_its_folder(trained: Path, tmp_path: Path) -> None:
    folder = copy(trained / "w2/verl", tmp_path / "actor")
    (folder / "huggingface").mkdir()
    (folder / "huggingface/config.json").write_text("{}")
    assert open_checkpoint(folder).directory == folder / "huggingface"


def test_two_models_in_one_folder_are_refused(trained: Path, tmp_path: Path) -> None:
    folder = copy(trained / "w2/accelerate_sharded", tmp_path / "both")
    copy(folder / "pytorch_model_fsdp_0", folder / "pytorch_model_fsdp_1")
    message = refusal(lambda: open_checkpoint(folder))
    assert "holds several models" in message and "pytorch_model_fsdp_0, pytorch_model_fsdp_1" in message
    assert open_checkpoint(folder, tag="pytorch_model_fsdp_1").specs()


def test_dcp_without_metadata_is_refused(trained: Path, tmp_path: Path) -> None:
    folder = copy(trained / "w2/dcp_raw", tmp_path / "cut")
    (folder / ".metadata").unlink()
    message = refusal(lambda: open_checkpoint(folder))
    assert "lacks .metadata" in message and "the save was interrupted" in message


def test_dcp_files_missing_extra_short_or_long_are_each_named(trained: Path, tmp_path: Path) -> None:
    source = trained / "w2/dcp_raw"
    missing = copy(source, tmp_path / "missing")
    (missing / "__1_0.distcp").unlink()
    assert "got none called __1_0.distcp" in refusal(lambda: open_checkpoint(missing))
    extra = copy(source, tmp_path / "extra")
    shutil.copy(extra / "__0_0.distcp", extra / "__2_0.distcp")
    assert "does not name: expected 2 files, got __2_0.distcp" in refusal(lambda: open_checkpoint(extra))
    short = copy(source, tmp_path / "short")
    content = (short / "__1_0.distcp").read_bytes()
    (short / "__1_0.distcp").write_bytes(content[:-100])
    assert "__1_0.distcp is cut off" in refusal(lambda: open_checkpoint(short))
    (short / "__1_0.distcp").write_bytes(content + b"\0")
    assert "__1_0.distcp is of another save" in refusal(lambda: open_checkpoint(short))


def test_dcp_files_of_two_ranks_swapped_are_refused(trained: Path, tmp_path: Path) -> None:
    folder = copy(trained / "w2/dcp_raw", tmp_path / "swapped")
    first, second = folder / "__0_0.distcp", folder / "__1_0.distcp"
    contents = first.read_bytes(), second.read_bytes()
    first.write_bytes(contents[1])
    second.write_bytes(contents[0])
    assert re.search("is (cut off|of another save)", refusal(lambda: open_checkpoint(folder)))


@pytest.mark.filterwarnings("ignore")
def test_a_file_under_another_ranks_name_is_refused_where_its_size_fits(tmp_path: Path) -> None:
    folder = tmp_path / "ranks"
    dcp.save({"a": torch.randn(8), "b": torch.zeros(4)}, checkpoint_id=folder, no_dist=True)
    first = folder / "__0_0.distcp"

    def add_rank(metadata: Any) -> None:
        for name, half in (("a", 8), ("b", 4)):
            entry = metadata.state_dict_metadata[name]
            entry.size = torch.Size([2 * half])
            entry.chunks.append(type(entry.chunks[0])(torch.Size([half]), torch.Size([half])))
            index = next(index for index in metadata.storage_data if index.fqn == name)
            moved = type(index)(name, torch.Size([half]), 1)
            place = metadata.storage_data[index]
            metadata.storage_data[moved] = type(place)("__1_0.distcp", place.offset, place.length)

    rewrite_metadata(folder, add_rank)
    shutil.copy(first, folder / "__1_0.distcp")
    assert "have the same contents" in refusal(lambda: open_checkpoint(folder))
    dcp.save({"a": torch.zeros(8), "b": torch.zeros(4)}, checkpoint_id=folder, no_dist=True)
    rewrite_metadata(folder, add_rank)
    shutil.copy(first, folder / "__1_0.distcp")
    assert_equal(open_checkpoint(folder), {"a": torch.zeros(16), "b": torch.zeros(8)})


def test_ranks_that_saved_alone_are_all_needed(trained: Path, tmp_path: Path) -> None:
    cut = copy(trained / "w4/dcp_alone", tmp_path / "cut")
    for path in cut.glob("__3*"):
        path.unlink()
    assert "do not make up the tensor" in refusal(lambda: open_checkpoint(cut))
    unnamed = copy(trained / "w4/dcp_alone", tmp_path / "unnamed")
    (unnamed / "__3.metadata").unlink()
    assert "does not name: expected 3 files, got __3_0.distcp" in refusal(lambda: open_checkpoint(unnamed))
    swapped = copy(trained / "w4/dcp_alone", tmp_path / "swapped")
    shutil.copy(swapped / "__0.metadata", swapped / "__1.metadata")
    assert "expected places in files __1_*, got __0_0.distcp" in refusal(lambda: open_checkpoint(swapped))


def test_a_flipped_bit_in_a_tensor_is_found_by_its_checksum(trained: Path, tmp_path: Path) -> None:
    folder = copy(trained / "w2/columns_dcp", tmp_path / "flipped")
    opened = open_checkpoint(folder)
    block = opened.tensors["wide"].ranges[0].block
    content = bytearray(block.path.read_bytes())
    content[block.offset] ^= 1
    block.path.write_bytes(content)
    assert "is damaged in" in refusal(lambda: open_checkpoint(folder).read("few"))


def rewrite_metadata(folder: Path, change: Callable[[Any], None]) -> None:
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def test_chunks_that_overlap_or_leave_a_gap_are_refused(trained: Path, tmp_path: Path) -> None:
    def move_chunk(metadata: Any) -> None:
        name = "inner.weight"
        old, new = torch.Size([7, 0]), torch.Size([6, 0])
        metadata.state_dict_metadata[name].chunks[1].offsets = new
        for index in list(metadata.storage_data):
            if index.fqn == name and index.offset == old:
                moved = type(index)(name, new, index.index)
                metadata.storage_data[moved] = metadata.storage_data.pop(index)

    def drop_chunk(metadata: Any) -> None:
        metadata.state_dict_metadata["inner.weight"].chunks.pop()
        for index in list(metadata.storage_data):
            if index.fqn == "inner.weight" and index.offset[0]:
                del metadata.storage_data[index]

    overlapping = copy(trained / "w2/dcp_raw", tmp_path / "overlapping")
    rewrite_metadata(overlapping, move_chunk)
    assert "chunks at [0, 0] and [6, 0] that overlap" in refusal(lambda: open_checkpoint(overlapping))
    gap = copy(trained / "w2/dcp_raw", tmp_path / "gap")
    rewrite_metadata(gap, drop_chunk)
    message = refusal(lambda: open_checkpoint(gap))
    assert "the chunks of inner.weight do not make up the tensor" in message and "got chunks of 70 elements" in message


def test_metadata_that_leads_outside_its_folder_is_refused(trained: Path, tmp_path: Path) -> None:
    def point_outside(metadata: Any) -> None:
        next(iter(metadata.storage_data.values())).relative_path = "../other.distcp"

    folder = copy(trained / "w2/dcp_raw", tmp_path / "outside")
    rewrite_metadata(folder, point_outside)
    assert "leads outside its folder" in refusal(lambda: open_checkpoint(folder))
    linked = copy(trained / "w2/dcp_raw", tmp_path / "linked")
    (linked / "__0_0.distcp").unlink()
    (linked / "__0_0.distcp").symlink_to(trained / "w2/dcp_raw/__0_0.distcp")
    assert "is a link that leads outside" in refusal(lambda: open_checkpoint(linked))


class Hostile:
    """Runs a command when a pickle of it is loaded."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        import os

        return os.system, (self.command,)


def test_a_hostile_pickle_in_metadata_runs_nothing_and_is_named(trained: Path, tmp_path: Path) -> None:
    folder = copy(trained / "w2/dcp_raw", tmp_path / "hostile")
    proof = tmp_path / "proof"
    (folder / ".metadata").write_bytes(pickle.dumps({"x": Hostile(f"touch {proof}")}))
    assert "system" in refusal(lambda: open_checkpoint(folder))
    assert not proof.exists()


def test_metadata_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"some": "thing"}))
    assert "is not the metadata of a sharded checkpoint" in refusal(lambda: open_checkpoint(tmp_path))
    (tmp_path / ".metadata").write_bytes(b"")
    assert "cannot be read" in refusal(lambda: open_checkpoint(tmp_path))


def test_metadata_lists_what_is_no_tensor_apart(trained: Path) -> None:
    metadata = read_metadata(trained / "w2/dcp_app/.metadata")
    assert "step" in metadata.objects and "app.model.inner.weight" in metadata.tensors
    assert metadata.tensors["app.model.inner.weight"].path == ("app", "model", "inner.weight")


@pytest.mark.filterwarnings("ignore")
def test_a_dtype_that_is_not_read_matters_in_the_model_alone(tmp_path: Path) -> None:
    waves = torch.ones(3, dtype=torch.complex64)
    dcp.save({"model": {"a": torch.ones(2)}, "waves": waves}, checkpoint_id=tmp_path / "beside", no_dist=True)
    assert_equal(open_checkpoint(tmp_path / "beside"), {"a": torch.ones(2)})
    dcp.save({"model": {"a": torch.ones(2), "waves": waves}}, checkpoint_id=tmp_path / "inside", no_dist=True)
    assert "holds tensors that are not read: waves: expected dense tensors of real numbers, got complex64" in (
        refusal(lambda: open_checkpoint(tmp_path / "inside"))
    )


@pytest.mark.filterwarnings("ignore")
def test_a_state_pickled_whole_and_the_safetensors_encoding_are_refused_as_what_they_are(tmp_path: Path) -> None:
    state = {"model": {"a": torch.ones(2)}}
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(state, checkpoint_id=tmp_path / "whole", planner=planner, no_dist=True)
    assert "only objects that one rank pickled whole: expected a place for each tensor's chunks, got model;" in (
        refusal(lambda: open_checkpoint(tmp_path / "whole"))
    )
    writer = dcp.FileSystemWriter(tmp_path / "encoded", serialization_format=SerializationFormat.SAFETENSORS)
    dcp.save(state, storage_writer=writer, no_dist=True)
    assert "__0_0.distcp is in safetensors, an encoding of .distcp files that is not read" in (
        refusal(lambda: open_checkpoint(tmp_path / "encoded"))
    )


class Unchanged(StreamTransformExtension):
    """An extension as users write them, in place of the compressing one, which needs another package."""

    @staticmethod
    def from_descriptor(version: str) -> Unchanged:
        return Unchanged()

    @staticmethod
    def registry_name() -> str:
        return "stream.unchanged"

    def get_descriptor(self) -> str:
        return "stream.unchanged/1"

    def transform_to(self, output: Any) -> Any:
        return output

    def transform_from(self, input: Any) -> Any:  # noqa: A002 (torch's own name for it)
        return input


@pytest.mark.filterwarnings("ignore")
def test_transformed_data_is_refused(tmp_path: Path) -> None:
    writer = dcp.FileSystemWriter(tmp_path, _extensions=[Unchanged()])
    dcp.save({"weight": torch.ones(3)}, storage_writer=writer, no_dist=True)
    assert "was saved through a transformation of its bytes" in refusal(lambda: open_checkpoint(tmp_path))


def test_rank_files_missing_swapped_truncated_or_of_another_run_are_each_named(trained: Path, tmp_path: Path) -> None:
    source = trained / "w2/rank_files"
    missing = copy(source, tmp_path / "missing")
    (missing / "pytorch_model_fsdp_0_rank1.bin").unlink()
    assert "lacks files of 2 ranks: expected 2 files, got 1, without rank 001" in refusal(
        lambda: open_checkpoint(missing)
    )
    extra = copy(source, tmp_path / "extra")
    shutil.copy(trained / "w4/rank_files/pytorch_model_fsdp_0_rank2.bin", extra)
    assert "lacks files of 4 ranks" in refusal(lambda: open_checkpoint(extra))
    shutil.copy(trained / "w4/rank_files/pytorch_model_fsdp_0_rank3.bin", extra)
    assert "has rank files of different runs" in refusal(lambda: open_checkpoint(extra))
    double = copy(source, tmp_path / "double")
    shutil.copy(double / "pytorch_model_fsdp_0_rank0.bin", double / "pytorch_model_fsdp_0_rank1.bin")
    assert "rank1.bin is the file of another rank: expected rank 1, got rank 0" in refusal(
        lambda: open_checkpoint(double)
    )
    short = copy(source, tmp_path / "short")
    path = short / "pytorch_model_fsdp_0_rank1.bin"
    path.write_bytes(path.read_bytes()[:-10])
    assert "rank1.bin is not an intact torch archive" in refusal(lambda: open_checkpoint(short))
    other = copy(source, tmp_path / "other")
    shutil.copy(trained / "w2/columns_rank_files/pytorch_model_fsdp_0_rank1.bin", other)
    assert "are of different models" in refusal(lambda: open_checkpoint(other))


def test_replicas_that_differ_are_refused(trained: Path, tmp_path: Path) -> None:
    folder = copy(trained / "w4/hybrid_rank_files", tmp_path / "replicas")
    path = folder / "pytorch_model_fsdp_0_rank2.bin"
    state = torch.load(path, weights_only=False)
    block = next(iter(open_torch_zip(path).storages.values()))
    assert state and block.crc32 is not None
    state["inner.weight"]._local_tensor[0, 0] += 1
    torch.save(state, path)
    assert "hold different copies of inner.weight" in refusal(lambda: open_checkpoint(folder))


def test_a_missing_safetensors_shard_is_refused_where_anything_shows_it(trained: Path, tmp_path: Path) -> None:
    source = trained / "w4/dcp_hf"
    shards = sorted(path.name for path in source.iterdir())
    middle = copy(source, tmp_path / "middle")
    (middle / shards[1]).unlink()
    assert "got none of rank 2" in refusal(lambda: open_checkpoint(middle))
    last = copy(source, tmp_path / "last")
    (last / shards[3]).unlink()
    facts = open_checkpoint(last).facts
    assert facts.missing and "the last ranks" in facts.missing[0]


def test_a_missing_last_shard_is_refused_by_config_json(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=30, n_positions=8, n_embd=12, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    config.architectures = ["GPT2LMHeadModel"]
    config.save_pretrained(tmp_path)
    save_shard(tmp_path / "shard-00001-model-00001-of-00001.safetensors", torch.ones(15, 12))
    message = refusal(lambda: open_checkpoint(tmp_path))
    assert "expected 30 rows, got 15; the last ranks' files are missing" in message
    base = tmp_path / "base"
    base.mkdir()
    (tmp_path / "config.json").rename(base / "config.json")
    assert "the last ranks" in open_checkpoint(tmp_path).facts.missing[0]
    assert "expected 30 rows, got 15; " in refusal(lambda: open_checkpoint(tmp_path, base=base))
    save_shard(tmp_path / "shard-00001-model-00001-of-00001.safetensors", torch.ones(30, 12))
    assert open_checkpoint(tmp_path, base=base).facts.missing == ()
    (base / "config.json").rename(tmp_path / "config.json")
    assert open_checkpoint(tmp_path).facts.missing == ()


def save_shard(path: Path, weight: torch.Tensor) -> None:
    info = '{"transformer.wte.weight": {"saved_offsets": [0, 0]}}'
    save_file({"transformer.wte.weight": weight}, path, metadata={"DCP_SHARDING_INFO": info})


def test_a_shard_that_does_not_say_what_it_holds_is_refused(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2)}, tmp_path / "shard-00001-model-00001-of-00001.safetensors")
    assert "does not say which part of each tensor it holds" in refusal(lambda: open_checkpoint(tmp_path))


def test_shards_left_in_the_writers_own_folder_are_read(trained: Path, tmp_path: Path) -> None:
    copy(trained / "w2/dcp_hf", tmp_path / "sharded")
    assert_equal(open_checkpoint(tmp_path), read_truth(trained / "w2/dcp_hf"))


def test_local_state_dicts_need_shapes_and_say_so(trained: Path, tmp_path: Path) -> None:
    folder = copy(trained / "w2/local", tmp_path / "local")
    truth = read_truth(trained / "w2/local")
    base = tmp_path / "base"
    base.mkdir()
    (folder / "config.json").rename(base / "config.json")
    assert "which keeps no shapes" in refusal(lambda: open_checkpoint(folder))
    assert_equal(open_checkpoint(folder, base=base), truth)
    shapes = {name: tuple(tensor.shape) for name, tensor in truth.items()}
    assert_equal(fsdp.open_folder(folder, shapes=shapes), truth)
    wrong = shapes | {"transformer.wte.weight": (31, 13)}
    assert "the slices of transformer.wte.weight do not make up" in refusal(
        lambda: fsdp.open_folder(folder, shapes=wrong)
    )
    more = shapes | {"transformer.more.weight": (2,)}
    assert "lacks tensors of the model that config.json describes" in (
        refusal(lambda: fsdp.open_folder(folder, shapes=more))
    )
    del wrong["transformer.wte.weight"]
    assert "lacks: expected the names of that model" in refusal(lambda: fsdp.open_folder(folder, shapes=wrong))
    (folder / "pytorch_model_fsdp_rank1.bin").unlink()
    assert "without rank 001" in refusal(lambda: fsdp.open_folder(folder, shapes=shapes))


@pytest.mark.parametrize("variant", ["local_flat", "local_buffers"])
def test_flat_parameters_are_refused_with_the_reason(trained: Path, tmp_path: Path, variant: str) -> None:
    folder = copy(trained / "w2" / variant, tmp_path / "flat")
    for _ in ("with config.json, where there is one", "without"):
        message = refusal(lambda: open_checkpoint(folder))
        assert "holds flat parameters" in message and "no file says where each parameter lies; save with" in message
        (folder / "config.json").unlink(missing_ok=True)


def store(path: Path, tensor: torch.Tensor) -> StoredTensor:
    torch.save(tensor, path)
    stored = open_torch_zip(path).content
    assert isinstance(stored, StoredTensor)
    return stored


@pytest.mark.parametrize("chunk_bytes", [1, 40, 1 << 20])
def test_boxes_of_any_grid_and_their_transpose_are_put_together(tmp_path: Path, chunk_bytes: int) -> None:
    whole = torch.arange(7 * 9, dtype=torch.float32).reshape(7, 9)
    boxes = []
    for rows in ((0, 3), (3, 7)):
        for columns in ((0, 4), (4, 5), (5, 9)):
            part = whole[slice(*rows), slice(*columns)].clone()
            boxes.append(Box((rows[0], columns[0]), store(tmp_path / f"{rows[0]}_{columns[0]}.pt", part)))
    tensor = assemble((7, 9), FLOAT32, boxes, name="grid")
    assert torch.equal(tensor.to_torch(), whole)
    assert b"".join(tensor.chunks(chunk_bytes)) == whole.numpy().tobytes()
    turned = transpose(tensor)
    assert turned.shape == (9, 7) and torch.equal(turned.to_torch(), whole.T)
    assert b"".join(turned.chunks(chunk_bytes)) == whole.T.contiguous().numpy().tobytes()


def test_a_transpose_reads_rows_that_cross_two_files(tmp_path: Path) -> None:
    whole = torch.arange(35, dtype=torch.float32).reshape(5, 7)
    flat = whole.flatten()
    parts = [store(tmp_path / f"{start}.pt", flat[start:stop].clone()) for start, stop in ((0, 10), (10, 11), (11, 35))]
    ranges = tuple(part.ranges[0] for part in parts)
    tensor = ContiguousTensor(dtype=FLOAT32, shape=(5, 7), ranges=ranges)
    assert torch.equal(transpose(tensor).to_torch(), whole.T)


def test_a_thousand_hostile_chunks_are_refused_in_time(tmp_path: Path) -> None:
    from export.checkpoints.storage.assembled_tensor import check_tiling

    boxes = [((index, index), (5000, 1)) for index in range(5000)]
    assert "do not make up the tensor" in refusal(lambda: check_tiling((10000, 5000), boxes, name="x"))


def test_no_byte_flipped_in_metadata_leads_to_anything_but_our_error(trained: Path, tmp_path: Path) -> None:
    folder = copy(trained / "w2/dcp_app", tmp_path / "fuzzed")
    content = (folder / ".metadata").read_bytes()
    truth = read_truth(trained / "w2/dcp_app")
    for position in range(0, len(content), 53):
        damaged = bytearray(content)
        damaged[position] ^= 1 << (position % 8)
        (folder / ".metadata").write_bytes(damaged)
        try:
            checkpoint = open_checkpoint(folder)
        except CheckpointError:
            continue
        assert checkpoint.tensors.keys() == truth.keys(), position
        for name, tensor in checkpoint.tensors.items():
            if tensor.shape == tuple(truth[name].shape):
                assert torch.equal(tensor.to_torch(), truth[name]), (position, name)
