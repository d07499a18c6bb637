import collections
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import save_file
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
        CheckpointError, match="become one without their wrappers' names: expected one tensor under each name"
    ):
        open_checkpoint(save(tmp_path, {"a._orig_mod.w": torch.ones(2), "a.w": torch.ones(3)}))


def test_what_accelerator_save_leaves_is_read_as_a_path_and_in_its_folder(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    accelerator = Accelerator(cpu=True)
    accelerator.save(accelerator.unwrap_model(accelerator.prepare(model)).state_dict(), tmp_path / "my_state.pkl")
    # What lies beside it under that suffix: the state of its random numbers, and of whatever was registered.
    accelerator.register_for_checkpointing(torch.optim.SGD(model.parameters(), lr=1.0))
    accelerator.save_state(str(tmp_path / "state"), safe_serialization=False)
    for path in (tmp_path / "state").iterdir():
        if path.suffix == ".pkl":
            path.rename(tmp_path / path.name)
    assert len(list(tmp_path.glob("*.pkl"))) > 2
    (tmp_path / "settings.pkl").write_bytes(pickle.dumps({"lr": 1.0}))
    for given in (tmp_path, tmp_path / "my_state.pkl"):
        found = open_checkpoint(given)
        assert found.format_name == "torch file my_state.pkl"
        assert found.tensors.keys() == model.state_dict().keys()
        assert all(torch.equal(found.read(name), value) for name, value in model.state_dict().items())
    with pytest.raises(CheckpointError, match=r"settings\.pkl is not in the format of torch\.save"):
        open_checkpoint(tmp_path / "settings.pkl")
    accelerator.save(model.state_dict(), tmp_path / "safe.pkl", safe_serialization=True)
    with pytest.raises(CheckpointError, match=r"got a safetensors file; name it safe\.safetensors\."):
        open_checkpoint(tmp_path / "safe.pkl")
    assert (
        open_checkpoint((tmp_path / "safe.pkl").rename(tmp_path / "safe.safetensors")).tensors.keys()
        == found.tensors.keys()
    )


def test_a_folder_with_a_bare_pickle_alone_is_refused_for_the_reason_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "state.pkl").write_bytes(pickle.dumps({"weight": [1.0]}))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "optimizer.pkl").write_bytes(b"")
    with pytest.raises(CheckpointError) as of_file:
        open_checkpoint(tmp_path / "state.pkl")
    assert f"{tmp_path / 'state.pkl'} is not in the format of torch.save" in str(of_file.value)
    assert "got a pickle by itself; if the weights are in it, load it and save them by torch.save" in str(of_file.value)
    with pytest.raises(CheckpointError) as of_folder:
        open_checkpoint(tmp_path)
    assert str(of_folder.value) == str(of_file.value)
    # It may lie about in the folder above.
    (tmp_path / "checkpoint-5").mkdir()
    with pytest.raises(CheckpointError, match="holds no checkpoint: .* pass one of checkpoint-5"):
        open_checkpoint(tmp_path)


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


def make_imaginary() -> torch.Tensor:
    return torch.conj(torch.complex(torch.ones(4), torch.arange(4.0))).imag


@pytest.mark.parametrize(
    ("tensor", "found"),
    [
        (
            torch.eye(3).to_sparse(),
            "torch._utils._rebuild_sparse_tensor; save the model's full state dict, unquantised",
        ),
        (make_imaginary(), r"a view with the bit neg set; save it again after resolve_neg\(\)"),
        (nn.Parameter(make_imaginary()), r"a view with the bit neg set; save it again after resolve_neg\(\)"),
        (torch._neg_view(torch.ones(3).to(torch.float8_e5m2)), "a view with the bit neg set; save it again after"),
        (torch.ones(2, dtype=torch.complex64), "elements of torch.ComplexFloatStorage; save the model's full"),
        (torch.ones(2, dtype=torch.int32).view(torch.complex32), "elements of torch.complex32; save the model's full"),
        (torch.ones(2).to(torch.float8_e4m3fnuz), "elements of torch.float8_e4m3fnuz; save the model's full"),
        (torch.ones(2).to(torch.float8_e8m0fnu), "elements of torch.float8_e8m0fnu; save the model's full"),
        (torch.ones(3, 1).expand(3, 7), r"a tensor that overlaps itself, .* one; call contiguous\(\) on it before"),
        (torch.arange(10.0).as_strided((4, 3), (2, 1)), "a tensor that overlaps itself, as expand"),
    ],
    ids=["sparse", "neg", "neg_parameter", "neg_v3", "complex64", "complex32", "fnuz", "e8m0", "expanded", "strided"],
)
def test_a_tensor_whose_values_are_not_its_bytes_is_refused_in_a_model_and_let_be_beside_it(
    tmp_path: Path, tensor: torch.Tensor, found: str
) -> None:
    state = {"v": torch.ones(2)}
    with pytest.raises(
        CheckpointError,
        match=f"holds tensors that are not read: w: expected dense tensors of real numbers, got {found}",
    ):
        open_checkpoint(save(tmp_path / "in", {"model": {"w": tensor, **state}}))
    assert_is(save(tmp_path / "beside", {"model": state, "mask": tensor, "more": {"mask": tensor}}), state)


def test_every_kind_of_a_tensor_that_is_not_read_is_named_with_its_remedy(tmp_path: Path) -> None:
    state = {"a": make_imaginary(), "b": torch.ones(1).expand(4)}
    with pytest.raises(
        CheckpointError,
        match=r"not read: a, b: .* bit neg set; call contiguous\(\) .*, save it again after resolve_neg",
    ):
        open_checkpoint(save(tmp_path, state))


def test_names_that_become_one_as_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match="holds two tensors of one name: expected names that differ as text, got 0"
    ):
        open_checkpoint(save(tmp_path, {0: torch.ones(2), "0": torch.zeros(2)}))


def test_a_defaultdict_is_a_state_dict_as_any_other(tmp_path: Path) -> None:
    state = make_model().state_dict()
    assert_is(save(tmp_path, {"model": collections.defaultdict(list, state)}), dict(state))


def test_settings_under_the_name_of_a_model_are_passed_over(tmp_path: Path) -> None:
    state = make_model().state_dict()
    settings = {"hidden": 4, "network": {"layers": [1, 2]}}
    assert_is(save(tmp_path / "one", {"state_dict": state, "model": settings}), state)
    assert_is(save(tmp_path / "two", {"state_dict": {"model": state}, "model": settings}), state)
    with pytest.raises(CheckpointError, match="holds no state dict: .* got the keys model, net; save"):
        open_checkpoint(save(tmp_path / "three", {"model": state, "net": state}))


def test_what_modules_keep_beside_their_tensors_is_left_out(tmp_path: Path) -> None:
    state = make_model().state_dict()
    extra = {"0._extra_state": io.BytesIO(b"x"), "1._extra_state": b"x"}
    assert_is(save(tmp_path / "one", {"model": {**state, **extra}}), state)
    assert_is(save(tmp_path / "two", {**state, **extra}, "pytorch_model.bin"), state)


@pytest.mark.parametrize(
    ("prefix", "words"),
    [
        ("module.", ", without prefix module."),
        ("_orig_mod.module.", ", without prefix _orig_mod.module."),
        ("0._orig_mod.", ", without _orig_mod. inside names"),
        ("module.0._orig_mod.", ", without prefix module. and _orig_mod. inside names"),
        ("model.", ""),
        ("", ""),
    ],
)
def test_a_folder_and_the_file_in_it_lose_the_same_prefixes(tmp_path: Path, prefix: str, words: str) -> None:
    state = make_model().state_dict()
    left = prefix.replace("_orig_mod.", "").replace("module.", "")
    wrapped, expected = add_prefix(state, prefix), add_prefix(state, left)
    folder = save(tmp_path / "bin", wrapped, "pytorch_model.bin")
    assert_is(folder, expected)
    assert_is(folder / "pytorch_model.bin", expected)
    assert open_checkpoint(folder).format_name == f"Hugging Face torch .bin, 1 file{words}"
    assert open_checkpoint(folder / "pytorch_model.bin").format_name == f"torch file pytorch_model.bin{words}"
    (tmp_path / "safetensors").mkdir()
    save_file(wrapped, tmp_path / "safetensors" / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path / "safetensors")
    assert checkpoint.format_name == f"Hugging Face safetensors, 1 file{words}"
    assert checkpoint.specs().keys() == expected.keys()


def test_names_that_fall_together_in_a_folder_are_refused(tmp_path: Path) -> None:
    state = {"a._orig_mod.w": torch.ones(2), "a.w": torch.ones(3)}
    with pytest.raises(CheckpointError, match="become one without their wrappers' names: expected one tensor"):
        open_checkpoint(save(tmp_path, state, "pytorch_model.bin"))


def test_placeholders_of_size_0_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError,
        match="are of size 0: w: expected whole tensors, got placeholders as ZeRO stage 3 leaves them in a model, or "
        "parameters that never had elements; after ZeRO stage 3, .*; otherwise, save the state dict without them",
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
