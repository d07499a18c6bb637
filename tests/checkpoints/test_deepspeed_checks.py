"""Every kind of damage to a real DeepSpeed checkpoint is refused by name, and leaves no output."""

import argparse
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from trainers.zero_checkpoints import copy_checkpoint, find_checkpoint

from export.checkpoints import open_checkpoint
from export.commands import consolidate, inspect_checkpoint
from export.errors import CheckpointError

TAG = "global_step2"


def optimizer_file(folder: Path, rank: int) -> Path:
    (path,) = (folder / TAG).glob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return path


def swap(first: Path, second: Path) -> None:
    spare = first.with_name("spare")
    first.rename(spare)
    second.rename(first)
    spare.rename(second)


def rewrite(path: Path, change: Callable[[dict], None]) -> None:
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)


def swap_optimizers(folder: Path) -> None:
    swap(optimizer_file(folder, 0), optimizer_file(folder, 1))


def double_optimizer(folder: Path) -> None:
    shutil.copyfile(optimizer_file(folder, 0), optimizer_file(folder, 1))


def lose_optimizer(folder: Path) -> None:
    optimizer_file(folder, 1).unlink()


def lose_first_optimizer(folder: Path) -> None:
    optimizer_file(folder, 0).unlink()


def lose_all_optimizers(folder: Path) -> None:
    for rank in (0, 1):
        optimizer_file(folder, rank).unlink()


def add_optimizer(folder: Path) -> None:
    path = optimizer_file(folder, 1)
    shutil.copyfile(path, path.with_name(path.name.replace("rank_1_", "rank_2_")))


def add_optimizer_of_another_precision(folder: Path) -> None:
    path = optimizer_file(folder, 1)
    shutil.copyfile(path, path.with_name(path.name.removeprefix("bf16_")))


def lose_model(folder: Path) -> None:
    sorted((folder / TAG).glob("*_model_states.pt"))[-1].unlink()


def swap_models(folder: Path) -> None:
    swap(*sorted((folder / TAG).glob("*_model_states.pt")))


def double_model(folder: Path) -> None:
    first, second = sorted((folder / TAG).glob("*_model_states.pt"))
    shutil.copyfile(first, second)


def age_optimizer(folder: Path) -> None:
    def take_step_back(content: dict) -> None:
        state = content["optimizer_state_dict"]
        inner = state.get("base_optimizer_state") or state["optimizer_state_dict"]
        for entry in inner["state"].values():
            entry["step"] -= 1

    rewrite(optimizer_file(folder, 1), take_step_back)


def age_model(folder: Path) -> None:
    rewrite(sorted((folder / TAG).glob("*_model_states.pt"))[-1], lambda content: content.update(global_steps=1))


def age_models(folder: Path) -> None:
    for path in folder.glob("global_step4/*_model_states.pt"):
        rewrite(path, lambda content: content.update(global_steps=3))


def renew_model(folder: Path) -> None:
    rewrite(folder / TAG / "mp_rank_00_model_states.pt", lambda content: content.update(global_steps=3))


def truncate(folder: Path) -> None:
    path = optimizer_file(folder, 1)
    path.write_bytes(path.read_bytes()[:-1000])


def flip_bit(folder: Path) -> None:
    path = optimizer_file(folder, 1)
    state = torch.load(path, weights_only=False)["optimizer_state_dict"]
    pieces = state.get("fp32_flat_groups") or state["single_partition_of_fp32_groups"]
    content = bytearray(path.read_bytes())
    position = content.find(pieces[0].detach().numpy().tobytes())
    assert position > 0
    content[position + 101] ^= 1
    path.write_bytes(content)


def flip_bit_beside(folder: Path) -> None:
    path = optimizer_file(folder, 0)
    state = torch.load(path, weights_only=False)["optimizer_state_dict"]
    inner = state.get("base_optimizer_state") or state["optimizer_state_dict"]
    content = bytearray(path.read_bytes())
    content[content.find(inner["state"][0]["exp_avg"].numpy().tobytes()) + 50] ^= 4
    path.write_bytes(content)


def lead_latest_outside(folder: Path) -> None:
    shutil.copytree(folder / TAG, folder.parent / "elsewhere")
    (folder / "latest").write_text("../elsewhere")


def lead_latest_nowhere(folder: Path) -> None:
    (folder / "latest").write_text("global_step9")


def link_file_outside(folder: Path) -> None:
    path = optimizer_file(folder, 1)
    path.rename(folder.parent / "moved.pt")
    path.symlink_to(folder.parent / "moved.pt")


def link_tag_outside(folder: Path) -> None:
    (folder / TAG).rename(folder.parent / "moved")
    (folder / TAG).symlink_to(folder.parent / "moved")


def put_nan(folder: Path) -> None:
    def poison(content: dict) -> None:
        state = content["optimizer_state_dict"]
        key = "fp32_flat_groups" if "fp32_flat_groups" in state else "single_partition_of_fp32_groups"
        with torch.no_grad():
            state[key][0][5] = float("nan")

    rewrite(optimizer_file(folder, 0), poison)


def change_copy(folder: Path) -> None:
    def change(content: dict) -> None:
        content["module"]["outer.weight"][0, 0] += 1

    rewrite(folder / TAG / "mp_rank_00_model_states.pt", change)


def change_gathered(folder: Path) -> None:
    def change(content: dict) -> None:
        content["outer.weight"][0, 0] += 1

    rewrite(folder / "pytorch_model.bin", change)


def forget_shared(folder: Path) -> None:
    for path in (folder / TAG).glob("*_model_states.pt"):
        rewrite(path, lambda content: content.update(shared_params={}))


def forget_buffer(folder: Path) -> None:
    rewrite(folder / TAG / "mp_rank_00_model_states.pt", lambda content: content["module"].pop("table"))


def change_frozen(folder: Path) -> None:
    def change(content: dict) -> None:
        # Another tensor: in the file, this one and the module's are the same bytes.
        content["frozen_param_fragments"]["frozen.bias"] = content["frozen_param_fragments"]["frozen.bias"] + 1

    rewrite(folder / TAG / "mp_rank_00_model_states.pt", change)


def mix_stages(folder: Path) -> None:
    other = find_checkpoint("z2_bf16") / TAG / "mp_rank_00_model_states.pt"
    shutil.copyfile(other, folder / TAG / other.name)


def add_expert(folder: Path) -> None:
    path = folder / TAG / "layer_0_expert_3_mp_rank_00_model_states.pt"
    content = {name.replace("experts.3.", "experts.4."): tensor for name, tensor in torch.load(path).items()}
    torch.save(content, path.with_name(path.name.replace("expert_3", "expert_4")))


def rename_expert(folder: Path) -> None:
    path = folder / TAG / "layer_0_expert_3_mp_rank_00_model_states.pt"
    torch.save({name.replace("weight", "kernel"): tensor for name, tensor in torch.load(path).items()}, path)


def empty_pieces(content: dict) -> None:
    groups = content["optimizer_state_dict"]["fp32_flat_groups"]
    groups[:] = [torch.empty(0) for _ in groups]


def offload_to_nvme(folder: Path) -> None:
    """As DeepSpeed 0.19.8 saves with offload_optimizer.device nvme (engine.py, `save_checkpoint`)."""
    for rank in (0, 1):
        rewrite(optimizer_file(folder, rank), empty_pieces)
        swapped = folder / TAG / "offloaded_tensors" / f"rank{rank}"
        swapped.mkdir(parents=True)
        (swapped / "140123_param.tensor.swp").write_bytes(bytes(64))


def configure_nvme(folder: Path) -> None:
    offload = {"offload_optimizer": {"device": "nvme", "nvme_path": "/local"}}
    for path in (folder / TAG).glob("*_model_states.pt"):
        rewrite(path, lambda content: content["ds_config"]["zero_optimization"].update(offload))
    for rank in (0, 1):
        rewrite(optimizer_file(folder, rank), empty_pieces)


DAMAGE = [
    (
        "z3_bf16",
        offload_to_nvme,
        "optim_states.pt holds no fp32 weights, because the optimizer was offloaded to NVMe: expected them in the "
        r"file itself, got swap files in offloaded_tensors for rank0, rank1, which say nothing .* save_16bit_model\.",
    ),
    (
        "z3_bf16",
        configure_nvme,
        "because the optimizer was offloaded to NVMe: .*offload_optimizer.device nvme in the run",
    ),
    ("z2_bf16", swap_optimizers, r"rank_0_mp_rank_00_optim_states.pt is the file of another rank: expected rank 0"),
    ("z2_round_robin_bf16", swap_optimizers, "is the file of another rank|disagree with the bfloat16 copy"),
    ("z1_bf16_optimizer", swap_optimizers, "is the file of another rank|disagree with the bfloat16 copy"),
    ("z3_bf16", swap_optimizers, "is the file of another rank: expected rank 1, got values in its padding"),
    ("z2_bf16", double_optimizer, "have the same contents: expected each rank's own part, got every checksum equal"),
    ("z3_bf16", double_optimizer, "have the same contents: expected each rank's own part, got every checksum equal"),
    ("z2_bf16", lose_optimizer, "lacks optimizer states of 2 ranks: expected 2 files, got 1, without rank 001"),
    ("z3_bf16", lose_optimizer, "lacks optimizer states of 2 ranks: expected 2 files, got 1, without rank 001"),
    ("z3_bf16", lose_first_optimizer, "lacks optimizer states of 2 ranks: expected 2 files, got 1, without rank 000"),
    ("z2_bf16", lose_all_optimizers, "lacks the optimizer states that hold its fp32 weights"),
    ("z3_bf16", lose_all_optimizers, "lacks the optimizer states that hold its fp32 weights"),
    ("z2_bf16", add_optimizer, "has optimizer states of more ranks than trained: expected 2 files, got 3"),
    ("z3_bf16", add_optimizer, "has optimizer states of more ranks than trained: expected 2 files, got 3"),
    ("z3_bf16", add_optimizer_of_another_precision, "has two files for rank 1: expected one per rank"),
    ("z2_bf16", lose_model, "lacks its model states"),
    ("z3_bf16", lose_model, "lacks model states of 2 ranks: expected 2 files, got 1, without rank 001"),
    ("z3_bf16", swap_models, "is the file of another rank: expected a later rank, got the file of rank 0"),
    ("z3_bf16", double_model, "have the same contents"),
    ("z2_bf16", age_optimizer, "are from different steps: expected one step, got step 1 in .*, step 2 in "),
    ("z3_bf16", age_optimizer, "are from different steps: expected one step, got step 1 in .*, step 2 in "),
    ("z2_bf16", age_model, "are from different steps: expected one step, got step 1 in .*, step 2 in "),
    ("z2_bf16", renew_model, "are from different steps: expected one step, got step 2 in .*, step 3 in "),
    ("z2_bf16", flip_bit_beside, r"is damaged in .*/data/\d+: expected CRC-32 [0-9a-f]{8}, got [0-9a-f]{8}; copy the"),
    ("z3_bf16", flip_bit_beside, r"is damaged in .*/data/\d+: expected CRC-32 [0-9a-f]{8}, got [0-9a-f]{8}; copy the"),
    ("z3_resumed", age_models, "are from different steps: expected one step, got step 3 in .*, step 8 in "),
    ("z3_bf16", age_model, "are from different steps: expected one step, got step 1 in .*, step 2 in "),
    ("z2_bf16", truncate, "is not an intact torch archive: expected the end of a zip archive in its last bytes"),
    ("z3_bf16", truncate, "is not an intact torch archive: expected the end of a zip archive in its last bytes"),
    ("z2_bf16", flip_bit, r"is damaged in .*/data/\d+: expected CRC-32 [0-9a-f]{8}, got [0-9a-f]{8}; copy the"),
    ("z3_bf16", flip_bit, r"is damaged in .*/data/\d+: expected CRC-32 [0-9a-f]{8}, got [0-9a-f]{8}; copy the"),
    (
        "z2_bf16",
        lead_latest_outside,
        r"latest leads outside .*: expected the name of a folder in it, got '../elsewhere'",
    ),
    ("z2_bf16", lead_latest_nowhere, "latest names a checkpoint that is not there: expected .*global_step9"),
    (
        "z2_bf16",
        link_file_outside,
        "is a link that leads outside .*: expected a file in the checkpoint, got .*moved.pt",
    ),
    ("z2_bf16", link_tag_outside, "is a link that leads outside .*: expected a file in the checkpoint, got .*moved"),
    ("z2_bf16", put_nan, r"are NaN or infinite: embed.weight: expected finite numbers, got 1 elements"),
    ("z3_bf16", put_nan, r"are NaN or infinite: embed.weight: expected finite numbers, got 1 elements"),
    ("z2_bf16", change_copy, "disagree with the bfloat16 copy in .*mp_rank_00_model_states.pt on outer.weight"),
    ("z1_fp32", change_copy, "disagree with the float32 copy in .*mp_rank_00_model_states.pt on outer.weight"),
    ("z3_gathered", change_gathered, "disagree with the bfloat16 copy in .*pytorch_model.bin on outer.weight"),
    ("z3_bf16", forget_shared, "lacks the weights of head.weight: expected fp32 pieces, frozen parameters or shared"),
    ("z2_bf16", forget_buffer, "lacks the buffers table: expected 4 recorded buffers in its module, got 3; copy the"),
    ("z2_bf16", change_frozen, "disagree with the bfloat16 copy in .*mp_rank_00_model_states.pt on frozen.bias"),
    (
        "z3_sequence",
        lambda folder: None,
        "cut for fewer ranks than saved them: expected parts for 2 ranks, got parts for 1,",
    ),
    ("z3_bf16", mix_stages, "holds the model states of stage 3 and of another stage"),
    ("moe_z2", lambda folder: next((folder / TAG).glob("layer_0_expert_3_*")).unlink(), "lacks experts: .*expert 3"),
    ("moe_z2", add_expert, "more experts than the model has: expected 4 files .*, got 5, with layer_0_expert_4"),
    ("moe_z2", rename_expert, r"are not of the experts that have files: .*, got moe\..*experts\.3\.weight in none"),
]


@pytest.mark.parametrize(
    ("variant", "damage", "sentence"),
    DAMAGE,
    ids=[f"{v}-{getattr(d, '__name__', 'd').strip('<>')}" for v, d, _ in DAMAGE],
)
def test_a_damaged_checkpoint_is_refused_in_one_sentence_and_leaves_nothing(
    variant: str, damage: Callable[[Path], None], sentence: str, tmp_path: Path
) -> None:
    folder = copy_checkpoint(variant, tmp_path)
    damage(folder)
    out = tmp_path / "results" / "out"
    out.parent.mkdir()
    with pytest.raises(CheckpointError, match=sentence) as refusal:
        consolidate.consolidate(folder, out)
    assert "\n" not in str(refusal.value)
    assert list(out.parent.iterdir()) == []


def test_equal_files_of_constants_are_no_copies_of_each_other(tmp_path: Path) -> None:
    # Their frozen parts are equal as saved, ones and zeros; their optimizers' but for what lies in the padding.
    folder = copy_checkpoint("z3_constant", tmp_path)
    (first, second) = (folder / "global_step0").glob("*_optim_states.pt")
    shutil.copyfile(first, second)
    checkpoint = open_checkpoint(folder)
    assert not checkpoint.read("embed.weight").any()
    assert torch.equal(checkpoint.read("still.weight"), torch.ones(8, dtype=torch.bfloat16))


def test_swapped_middle_ranks_without_padding_are_what_nothing_at_stage_3_can_show(tmp_path: Path) -> None:
    # Documented in `export.checkpoints.deepspeed_checks`: of 11 ranks, both hold slices that no parameter pads.
    folder = copy_checkpoint("z3_world11", tmp_path)
    swap(optimizer_file(folder, 1), optimizer_file(folder, 2))
    inspect_checkpoint.inspect_checkpoint(folder)


def test_a_rank_that_moved_over_padding_is_found_among_eleven(tmp_path: Path) -> None:
    folder = copy_checkpoint("z3_world11", tmp_path)
    swap(optimizer_file(folder, 2), optimizer_file(folder, 10))
    with pytest.raises(CheckpointError, match="is the file of another rank"):
        inspect_checkpoint.inspect_checkpoint(folder)


def test_non_finite_weights_pass_only_when_asked_for(tmp_path: Path) -> None:
    folder = copy_checkpoint("z3_bf16", tmp_path)
    put_nan(folder)
    consolidate.consolidate(folder, tmp_path / "out", allow_non_finite=True)
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_the_verbs_exit_with_0_and_say_what_they_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    subparsers = parser.add_subparsers()
    consolidate.add_parser(subparsers)
    inspect_checkpoint.add_parser(subparsers)
    folder, out = find_checkpoint("z2_bf16"), tmp_path / "out"
    args = parser.parse_args(["consolidate", str(folder), str(out)])
    assert args.run(args) == 0
    assert capsys.readouterr().out.startswith(
        f"{out}: 15 tensors, 0.000 GB, 1 tied names recorded, from DeepSpeed ZeRO stage 2, 2 ranks, in "
    )
    args = parser.parse_args(["inspect", str(folder), "--json"])
    assert args.run(args) == 0
    assert '"parameters": 702' in capsys.readouterr().out
