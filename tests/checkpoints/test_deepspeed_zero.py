import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from harness import CHECKOUT, Finished
from nodes import spread_over_nodes
from safetensors import safe_open
from trainers.zero_checkpoints import (
    EXCLUDED_ZERO,
    MATRIX_ZERO,
    REFUSED_ZERO,
    SMALL_ZERO,
    TRAINERS,
    UNIVERSAL,
    copy_checkpoint,
    find_checkpoint,
    mark_matrix,
)
from transformers import GPT2LMHeadModel

from export.checkpoints import join_folders, open_checkpoint
from export.consolidation.consolidate import consolidate
from export.errors import _SHOWN, CheckpointError


def read_truth(name: str) -> dict[str, torch.Tensor]:
    truth: dict[str, torch.Tensor] = torch.load(find_checkpoint(name).with_name(f"{name}.truth.pt"))
    return truth


def assert_equal(checkpoint, truth: dict[str, torch.Tensor]) -> None:
    specs = checkpoint.specs()
    assert specs.keys() == truth.keys()
    for name, expected in truth.items():
        tensor = checkpoint.read(name)
        assert (tensor.dtype, tuple(tensor.shape)) == (specs[name].dtype, specs[name].shape)
        assert tensor.dtype == expected.dtype, name
        assert torch.equal(tensor, expected), name


@pytest.mark.parametrize("name", mark_matrix(*SMALL_ZERO, *MATRIX_ZERO))
def test_every_tensor_equals_the_live_ranks_bit_for_bit(name: str) -> None:
    assert_equal(open_checkpoint(find_checkpoint(name)), read_truth(name))


@pytest.mark.parametrize("name", [name for name in UNIVERSAL if "round_robin" not in name])
def test_a_universal_checkpoint_equals_the_live_ranks_bit_for_bit(name: str) -> None:
    checkpoint = open_checkpoint(find_checkpoint(name))
    assert checkpoint.format_name == "DeepSpeed universal checkpoint"
    assert_equal(checkpoint, read_truth(name.removeprefix("universal_")))


@pytest.mark.parametrize("name", mark_matrix(*TRAINERS))
def test_what_trainers_leave_equals_the_live_ranks_and_loads_by_from_pretrained(name: str, tmp_path: Path) -> None:
    folder = find_checkpoint(name)
    folder = folder / "checkpoint-2" if name.startswith("trainer") else folder
    assert_equal(open_checkpoint(folder), read_truth(name))
    if name.startswith("trainer"):
        # The configuration of bf16 training asks for bf16, in which fp32 weights would be rounded.
        assert '"dtype": "bfloat16"' in (folder / "config.json").read_text()
        consolidate(folder, tmp_path / "out", max_shard_bytes=10_000)
        model = GPT2LMHeadModel.from_pretrained(tmp_path / "out")
        assert all(torch.equal(tensor, read_truth(name)[key]) for key, tensor in model.state_dict().items())


def test_a_universal_checkpoint_whose_parameters_the_conversion_mixed_up_is_refused() -> None:
    checkpoint = open_checkpoint(find_checkpoint("universal_z2_round_robin"))
    with pytest.raises(CheckpointError, match=r"disagree with the bfloat16 copy .* on .*inner\.weight"):
        checkpoint.read("inner.weight")


@pytest.mark.parametrize("name", ["z1_bf16", "z3_bf16"])
def test_the_folders_of_all_nodes_are_one_checkpoint(
    name: str, tmp_path: Path, export_cli: Callable[..., Finished]
) -> None:
    nodes = spread_over_nodes(find_checkpoint(name), tmp_path)
    assert_equal(open_checkpoint(join_folders(nodes)), read_truth(name))
    one = export_cli("inspect", str(nodes[1]))
    assert one.code == 1
    assert "lacks" in one.err
    told = json.loads(export_cli("inspect", *map(str, nodes), "--json").out)
    assert {Path(path).relative_to(tmp_path).parts[0] for path in told["files"]} == {"node0", "node1"}
    done = export_cli("consolidate", *map(str, nodes), "--output", str(tmp_path / "out"))
    assert done.code == 0, done.err
    consolidate(find_checkpoint(name), tmp_path / "whole")
    weights = [(tmp_path / folder / "model.safetensors").read_bytes() for folder in ("out", "whole")]
    assert weights[0] == weights[1]


@pytest.mark.parametrize("name", ["z1_bf16", "z3_bf16", "moe_z2"])
def test_a_node_whose_folder_was_not_named_is_asked_for(name: str, tmp_path: Path) -> None:
    nodes = spread_over_nodes(find_checkpoint(name), tmp_path, 3)
    for lost in nodes:
        given = [node for node in nodes if node != lost]
        with pytest.raises(
            CheckpointError, match=r"lacks .*pass every node's folder as an argument of its own, or copy"
        ):
            open_checkpoint(join_folders(given))


def test_folders_of_two_saves_or_runs_are_refused(tmp_path: Path, export_cli: Callable[..., Finished]) -> None:
    first, second = map(str, spread_over_nodes(find_checkpoint("z3_bf16"), tmp_path))
    latest = Path(second, "latest")
    tag = latest.read_text()
    latest.write_text("global_step9")
    refused = export_cli("inspect", first, second)
    assert refused.code == 1
    assert refused.err == (
        f"error: {second}/latest and {first}/latest are two different files of one name: expected the folders of one "
        "save, in which files of one name are equal, got other bytes; pass the folders of one run and one step.\n"
    )
    latest.write_text(tag)
    # Both together are called as a shell takes them.
    apart = Path(shutil.copytree(first, tmp_path / "a b"))
    join_folders([apart, Path(second)])
    assert f"{{'{apart}',{second}}}" in _SHOWN.values()
    # The same rank of another step.
    (states,) = Path(second, tag).glob("*_optim_states.pt")
    content = torch.load(states, weights_only=False)
    for state in content["optimizer_state_dict"]["optimizer_state_dict"]["state"].values():
        state["step"] += 1
    torch.save(content, states)
    refused = export_cli("inspect", first, second)
    assert refused.code == 1
    assert f"error: the files in {{{first},{second}}}/{tag} are from different steps" in refused.err
    assert "one folder is named twice" in export_cli("inspect", first, first).err
    assert "there is no folder to write to" in export_cli("consolidate", first).err


def test_a_shared_parameter_is_the_same_bytes_as_its_holder() -> None:
    for name in ("z1_bf16", "z2_bf16", "z3_bf16", "universal_z2_bf16"):
        checkpoint = open_checkpoint(find_checkpoint(name))
        assert checkpoint.tied == {"head.weight": "embed.weight"}
        assert checkpoint.tensors["head.weight"] == checkpoint.tensors["embed.weight"]


def test_names_are_tied_only_where_all_their_elements_are_shared() -> None:
    for name in ("z1_shared", "z2_shared", "z3_shared"):
        checkpoint = open_checkpoint(find_checkpoint(name))
        assert checkpoint.tied == {"twice.1.weight": "twice.0.weight", "same.weight": "still.weight"}
        assert checkpoint.tensors["part"].shape == (3, 4)
    assert checkpoint.zero_size == {"spare.empty", "spare.other"}


@pytest.mark.parametrize("name", EXCLUDED_ZERO)
def test_frozen_parameters_left_out_on_purpose_are_told_and_the_rest_is_whole(name: str) -> None:
    checkpoint = open_checkpoint(find_checkpoint(name))
    truth = read_truth(name)
    assert_equal(checkpoint, {key: truth[key] for key in checkpoint.tensors})
    lacking = {"frozen.weight", "frozen.bias", "base", "part", "still.weight"}
    # Only stage 3 keeps nothing of a second name.
    assert truth.keys() - checkpoint.tensors.keys() == lacking | ({"same.weight"} if name == "z3_excluded" else set())
    excluded = "the frozen parameters: left out when it was saved, by exclude_frozen_parameters"
    assert checkpoint.facts.missing[-1] == excluded


def test_the_facts_are_those_of_the_run() -> None:
    checkpoint = open_checkpoint(find_checkpoint("z3_world11"))
    assert checkpoint.format_name == "DeepSpeed ZeRO stage 3, 11 ranks"
    facts = checkpoint.facts
    assert facts.trainer is not None and facts.trainer.startswith("DeepSpeed 0.")
    assert (facts.world_size, facts.stage, facts.step) == (11, 3, 2)
    alike = "001, 002, 003, 004, 005, 006, 007, 008, 009"
    assert facts.missing == (
        f"proof of the order of ranks {alike}: no gathered copy lies beside them",
        "proof that the files of all ranks are of one run: no gathered copy lies beside them",
        "proof of the order of the ranks' parts of frozen.bias, frozen.weight: no gathered copy lies beside them",
        "fp32 weights of frozen.bias, frozen.weight: saved as bfloat16 only",
    )


def test_what_the_counts_cannot_show_after_a_universal_checkpoint_was_loaded_is_told() -> None:
    checkpoint = open_checkpoint(find_checkpoint("z3_resumed"))
    assert checkpoint.facts.step == 4
    assert any(
        line.startswith("proof that optimizer and model states are of one step: since a universal checkpoint")
        for line in checkpoint.facts.missing
    )


def test_a_tag_is_taken_by_name_by_its_folder_and_by_latest(tmp_path: Path) -> None:
    folder = copy_checkpoint("z2_bf16", tmp_path)
    by_latest = open_checkpoint(folder)
    for other in (open_checkpoint(folder, tag="global_step2"), open_checkpoint(folder / "global_step2")):
        assert other.tensors == by_latest.tensors
    (folder / "latest").unlink()
    assert open_checkpoint(folder).tensors == by_latest.tensors


def test_a_gathered_copy_beside_the_pieces_is_not_what_is_read() -> None:
    checkpoint = open_checkpoint(find_checkpoint("z3_gathered"))
    assert (find_checkpoint("z3_gathered") / "pytorch_model.bin").is_file()
    assert checkpoint.format_name == "DeepSpeed ZeRO stage 3, 2 ranks"
    assert checkpoint.specs()["embed.weight"].dtype == torch.float32


@pytest.mark.parametrize("kind", ["placeholders", "other names", "wrapped names"])
def test_a_gathered_copy_proves_nothing_unless_it_holds_the_weights(tmp_path: Path, kind: str) -> None:
    folder = copy_checkpoint("z3_gathered", tmp_path)
    assert not any("gathered copy" in what for what in open_checkpoint(folder).facts.missing)
    state = torch.load(folder / "pytorch_model.bin")
    if kind == "placeholders":
        state = {name: torch.empty(0) for name in state}
    elif kind == "other names":
        state = {f"net.{name}": tensor for name, tensor in state.items()}
    else:
        state = {f"module.{name}": tensor for name, tensor in state.items()}
    torch.save(state, folder / "pytorch_model.bin")
    checkpoint = open_checkpoint(folder)
    told = [what for what in checkpoint.facts.missing if "gathered copy" in what]
    if kind == "wrapped names":
        assert not told
        torch.save(state | {"module.odd": state["module.odd"] + 1}, folder / "pytorch_model.bin")
        with pytest.raises(CheckpointError, match="disagree with the bfloat16 copy .* on odd"):
            open_checkpoint(folder).verify()
    else:
        assert "proof that the files of all ranks are of one run: no gathered copy lies beside them" in told
        assert any(what.startswith("a comparison with the gathered copy") for what in told) == (kind == "other names")
        checkpoint.verify()


def test_neither_torch_nor_a_trainer_is_needed_to_consolidate(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "for name in ('torch', 'deepspeed', 'accelerate', 'transformers', 'safetensors'):\n"
        "    sys.modules[name] = None\n"
        "from pathlib import Path\n"
        "from export.consolidation.consolidate import consolidate\n"
        "consolidate(Path(sys.argv[1]), Path(sys.argv[2]))\n"
    )
    source = find_checkpoint("z3_world3")
    command = [sys.executable, "-c", script, str(source), str(tmp_path / "out")]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    truth = read_truth("z3_world3")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata()["head.weight"] == "embed.weight"
        assert set(file.keys()) == truth.keys() - {"head.weight"}
        assert all(torch.equal(file.get_tensor(name), truth[name]) for name in file.keys())  # noqa: SIM118


def test_the_list_of_variants_is_whole() -> None:
    script = "import json; from train_zero import *; print(json.dumps([*VARIANTS, *UNIVERSAL, *TRAINERS]))"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=CHECKOUT / "tests" / "trainers", capture_output=True, text=True, check=True
    )
    assert set(json.loads(done.stdout.splitlines()[-1])) == {
        *(*SMALL_ZERO, *EXCLUDED_ZERO, *MATRIX_ZERO, *REFUSED_ZERO, *UNIVERSAL, *TRAINERS)
    }
