from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from export.checkpoints import open_checkpoint
from export.errors import CheckpointError


def make_model() -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3, bias=False))
    model[2].weight = nn.Parameter(model[0].weight.detach().t().contiguous())
    return model


def save(folder: Path, content: Any, name: str = "checkpoint.pth") -> Path:
    folder.mkdir(exist_ok=True)
    torch.save(content, folder / name)
    return folder


def add_prefix(state: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {prefix + name: tensor for name, tensor in state.items()}


def assert_is(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    checkpoint = open_checkpoint(folder)
    assert list(checkpoint.specs()) == list(expected)
    assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    "prefix",
    ["", "module.", "_orig_mod.", "_forward_module.", "model.", "module._orig_mod.", "_orig_mod.module.model."],
)
def test_prefixes_of_wrappers_are_taken_off_every_name(tmp_path: Path, prefix: str) -> None:
    state = make_model().state_dict()
    assert_is(save(tmp_path, add_prefix(state, prefix)), state)


@pytest.mark.parametrize(
    "keys",
    [("state_dict",), ("model",), ("module",), ("model_state_dict",), ("state", "model"), ("model", "state_dict")],
)
def test_the_state_dict_is_found_under_the_keys_that_name_it(tmp_path: Path, keys: tuple[str, ...]) -> None:
    state = make_model().state_dict()
    content: Any = add_prefix(state, "module.")
    for key in reversed(keys):
        content = {key: content, "epoch": 3, "optimizer": {"state": {}, "param_groups": []}}
    if keys[0] == "state":
        with pytest.raises(
            CheckpointError, match=r"holds no state dict: .* got the keys epoch, optimizer, state; save"
        ):
            open_checkpoint(save(tmp_path, content))
    else:
        assert_is(save(tmp_path, content), state)


def test_what_torch_compile_itself_saves_is_read(tmp_path: Path) -> None:
    model = make_model()
    compiled = torch.compile(model)
    assert all(name.startswith("_orig_mod.") for name in compiled.state_dict())
    assert_is(save(tmp_path, compiled.state_dict()), model.state_dict())
    model[0] = torch.compile(model[0])
    assert "0._orig_mod.weight" in model.state_dict()
    assert_is(save(tmp_path, model.state_dict()), make_model().state_dict())


def test_a_prefix_that_is_the_models_own_stays(tmp_path: Path) -> None:
    state = {"model.layers.0.weight": torch.ones(2), "lm_head.weight": torch.ones(3)}
    assert_is(save(tmp_path, state), state)
    assert_is(save(tmp_path, add_prefix(state, "model.")), state)
    mixed = {"module.a": torch.ones(2), "b": torch.ones(3)}
    assert_is(save(tmp_path, mixed), mixed)


def test_names_that_fall_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"fall together without _orig_mod\.: expected one weight under each name"
    ):
        open_checkpoint(save(tmp_path, {"a._orig_mod.w": torch.ones(2), "a.w": torch.ones(3)}))


def test_files_of_optimizers_beside_the_model_are_passed_over(tmp_path: Path) -> None:
    state = make_model().state_dict()
    save(tmp_path, {"state": {}}, "optimizer.pt")
    save(tmp_path, {"cpu": 1}, "rng_state_0.pth")
    assert_is(save(tmp_path, state), state)


def test_several_models_are_refused_until_one_is_chosen(tmp_path: Path) -> None:
    save(tmp_path, {"w": torch.ones(2)}, "best.pth")
    save(tmp_path, {"w": torch.zeros(2)}, "last.pth")
    with pytest.raises(
        CheckpointError, match=r"several files that may be the model: .* got best\.pth, last\.pth; pass"
    ):
        open_checkpoint(tmp_path)
    for chosen in (open_checkpoint(tmp_path, tag="last.pth"), open_checkpoint(tmp_path / "last.pth")):
        assert torch.equal(chosen.read("w"), torch.zeros(2))
        assert chosen.directory == tmp_path


def test_a_whole_module_is_refused_by_its_class(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"got a whole object of torch\.nn\.modules\.linear\.Linear; save model\."
    ):
        open_checkpoint(save(tmp_path, nn.Linear(2, 2)))


def test_tensors_that_are_no_byte_ranges_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds tensors that are not read: w: expected dense tensors of real"):
        open_checkpoint(save(tmp_path, {"w": torch.eye(3).to_sparse(), "v": torch.ones(2)}))


def test_placeholders_of_size_0_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match="are of size 0: w: expected whole tensors, got the placeholders that ZeRO"
    ):
        open_checkpoint(save(tmp_path, {"w": torch.empty(0), "v": torch.ones(2)}))


def test_tied_weights_and_those_with_other_strides_are_read(tmp_path: Path) -> None:
    weight = torch.randn(5, 4)
    state = {
        "a": weight,
        "b": weight,
        "c": weight.t(),
        "d": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    }
    assert_is(save(tmp_path, state), state)
    assert open_checkpoint(tmp_path).tied == {"b": "a"}
