import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from google.protobuf import text_format
from harness import Finished, fingerprint
from launcher import running
from tritonclient.grpc import model_config_pb2 as pb

from export.checkpoints import open_checkpoint
from export.errors import ModelError, SettingsError
from export.repository.model_config import build_configs, name_models
from export.signature import BATCH, ModelSignature, TensorSignature
from export.tasks.own_module import FactoryTask, build_factory_task, read_spec
from export.weights.transforms import CastToFloat32

MODULES = '''
import torch
from torch import nn


class Frames(nn.Module):
    """A scorer of frames, masked."""

    def __init__(self, width=16):
        super().__init__()
        self.inner = nn.Linear(8, width)
        self.head = nn.Linear(width, 3)

    def forward(self, frames, mask):
        states = self.inner(frames).tanh()
        weights = mask.float().unsqueeze(-1)
        return {"scores": self.head((states * weights).sum(1) / weights.sum(1)), "states": states}


class Centred(nn.Module):
    def forward(self, values):
        return values - values.mean(0)


class Third(nn.Module):
    """A table of ids from 3 on."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(2, 4)

    def forward(self, ids):
        return self.table(ids - 3)


class Shared(nn.Module):
    """All rows are weighed alike."""

    def forward(self, values, weights):
        return (values * weights).sum(-1, keepdim=True), weights * 2


class Half(nn.Module):
    """Of 16 bits, and of one number a row."""

    def forward(self, values, added):
        return (values + added.float().sum(-1, keepdim=True)).half(), values.sum(-1)


class Added(nn.Module):
    def forward(self, values, added):
        return values + added.reshape(-1, 1)


class Summary(nn.Module):
    def forward(self, values):
        return values * 2, values.new_ones(3)


class Noisy(nn.Module):
    def forward(self, values):
        return values + torch.randn_like(values)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("asked", torch.zeros(()))

    def forward(self, values):
        self.asked += 1
        return values * 2


class Branching(nn.Module):
    def forward(self, values):
        return values * 2 if values.sum() > 0 else values * 3


class Looping(nn.Module):
    """Its loop over an axis is what the exporter refuses; a trace would make the length a constant."""

    def forward(self, values):
        total = torch.zeros(values.shape[0], 1)
        for index in range(values.shape[1]):
            total = total + values[:, index : index + 1]
        return total


class Encoder(nn.Module):
    """torch's fast path for attention zeroes what is padding, which no graph does."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 1)

    def forward(self, values, mask):
        return self.layers(values, src_key_padding_mask=mask == 0)


class Colliding(nn.Module):
    """Returns its input as it came, a value twice, and values that bear names of the graph's own inside."""

    def forward(self, values):
        linear = values * 2
        return values, linear, linear, linear + 1


class Recurrent(nn.Module):
    """The exporter writes down its output with the length of the example; a trace does not."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.cells = nn.GRU(8, 4, batch_first=True)

    def forward(self, frames):
        return self.cells(frames)[0]


class Twice(nn.Module):
    """One layer at two places, as the tied layers of a pipeline are."""

    def __init__(self):
        super().__init__()
        self.first = self.last = nn.Linear(8, 8)

    def forward(self, values):
        return self.last(self.first(values).tanh())


class Turned(nn.Module):
    """Two weights of which one is the other transposed, as of an autoencoder."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.last.weight = nn.Parameter(self.first.weight.t())

    def forward(self, values):
        return self.last(self.first(values).tanh())


def frames(width=16):
    torch.manual_seed(0)
    return Frames(width)


def broken():
    raise RuntimeError("no such file: weights.bin")


def no_module():
    return 3
'''

FRAMES = {
    "inputs": {
        "frames": {"shape": ["batch", "time", 8]},
        "mask": {"dtype": "int64", "shape": ["batch", "time"], "values": "mask"},
    },
    "outputs": ["scores", "states"],
    "dims": {"time": {"max": 64}},
    "arguments": {"width": 12},
}
VALUES = {"inputs": {"values": {"shape": ["batch", "width"]}}, "outputs": ["result"]}


@pytest.fixture
def module_file(tmp_path: Path) -> Path:
    (tmp_path / "modules.py").write_text(MODULES)
    return tmp_path / "modules.py"


def write_spec(folder: Path, content: object) -> Path:
    (folder / "inputs.json").write_text(json.dumps(content))
    return folder / "inputs.json"


def build(module_file: Path, name: str, spec: object) -> FactoryTask:
    return build_factory_task(f"{module_file}:{name}", write_spec(module_file.parent, spec), None)


def publish(
    export_cli: Callable[..., Finished], module_file: Path, name: str, spec: object, *options: str
) -> tuple[Finished, pb.ModelConfig]:
    folder = module_file.parent
    write_spec(folder, spec)
    entry = ["--factory", f"{module_file}:{name}", "--inputs", str(folder / "inputs.json")]
    done = export_cli("run", *entry, "--name", "mine", "--repository", str(folder / "models"), "--json", *options)
    config = pb.ModelConfig()
    if done.code == 0:
        text_format.Parse((folder / "models" / "mine" / "config.pbtxt").read_text(), config)
    return done, config


def list_steps(done: Finished) -> list[tuple[int, int]]:
    """Return number and total of each step that has ended, below which its time stands."""
    found = re.findall(r"^\[(\d+)/(\d+)\] .*\n +[\d.]+ s$", done.err, re.MULTILINE)
    return [(int(number), int(total)) for number, total in found]


def test_a_module_of_ones_own_is_published_as_a_model_of_tensors(
    export_cli: Callable[..., Finished], module_file: Path
) -> None:
    done, config = publish(export_cli, module_file, "frames", {**FRAMES, "dims": {"time": {"min": 3, "max": 64}}})
    assert done.code == 0, done.err
    assert list_steps(done) == [(step, 5) for step in range(1, 6)]
    result = json.loads(done.out)
    assert result["contract"] == {"inputs": ["frames", "mask"], "outputs": ["scores", "states"]}
    assert result["notes"] == []
    assert result["report"]["passed"]
    assert config.max_batch_size == 32
    (warmup,) = config.model_warmup
    assert {name: list(given.dims) for name, given in warmup.inputs.items()} == {"frames": [3, 8], "mask": [3]}
    assert {tensor.name: list(tensor.dims) for tensor in config.output} == {"scores": [3], "states": [-1, 12]}
    files = {path.name for path in (module_file.parent / "models" / "mine" / "1").iterdir()}
    documents = {"golden.json", "verification.json", "verification.html", "modelyard.lock.json", "publication.json"}
    assert files == {"model.onnx", "configs", "SHA256SUMS", *documents}


def test_trained_weights_are_placed_and_others_are_refused(
    export_cli: Callable[..., Finished], module_file: Path
) -> None:
    folder = module_file.parent
    task = build(module_file, "frames", FRAMES)
    trained = {name: value + 1 for name, value in task.module.module.state_dict().items()}
    torch.save(trained, folder / "trained.pt")
    done, _ = publish(export_cli, module_file, "frames", FRAMES, str(folder / "trained.pt"))
    assert done.code == 0, done.err
    torch.save({name: value for name, value in trained.items() if name != "head.bias"}, folder / "less.pt")
    before = fingerprint(folder / "models")
    done, _ = publish(export_cli, module_file, "frames", FRAMES, str(folder / "less.pt"))
    assert done.code == 1
    assert "the weights do not fit the module" in done.err
    assert "none for head.bias" in done.err
    assert fingerprint(folder / "models") == before


def load_twice(module_file: Path, saved: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what a module with one layer at two places, `first` and `last`, holds of a checkpoint."""
    torch.save(saved, module_file.parent / "trained.pt")
    checkpoint = open_checkpoint(module_file.parent / "trained.pt")
    spec = write_spec(module_file.parent, {"inputs": {"values": {"shape": ["batch", 8]}}, "outputs": ["result"]})
    return build_factory_task(f"{module_file}:Twice", spec, CastToFloat32(source=checkpoint)).module.module.state_dict()


def test_a_layer_at_several_places_takes_what_was_trained_as_one(module_file: Path) -> None:
    layer = torch.nn.Linear(8, 8).state_dict()
    first, last = ({f"{place}.{name}": value.clone() for name, value in layer.items()} for place in ("first", "last"))
    rounded = {name: value.bfloat16() for name, value in first.items()}
    # Saved for each place; once, as a pipeline keeps a tied layer; and in training precision beside the fp32 weights.
    for saved in (first | last, last, rounded | last):
        held = load_twice(module_file, saved)
        assert all(torch.equal(held[name], value) for name, value in (first | last).items())


@pytest.mark.parametrize("is_alike", [True, False])
def test_a_weight_that_is_another_transposed_takes_what_is_so_alone(is_alike: bool, module_file: Path) -> None:
    weight = torch.randn(8, 8)
    saved = {"first.weight": weight, "last.weight": weight.t() if is_alike else weight}
    torch.save({name: value.clone() for name, value in saved.items()}, module_file.parent / "trained.pt")
    checkpoint = CastToFloat32(source=open_checkpoint(module_file.parent / "trained.pt"))
    spec = write_spec(module_file.parent, {"inputs": {"values": {"shape": ["batch", 8]}}, "outputs": ["result"]})
    if is_alike:
        held = build_factory_task(f"{module_file}:Turned", spec, checkpoint).module.module.state_dict()
        assert torch.equal(held["first.weight"], weight) and torch.equal(held["last.weight"], weight.t())
        return
    with pytest.raises(ModelError, match="shares tensors that were trained apart: .* first.weight, last.weight, which"):
        build_factory_task(f"{module_file}:Turned", spec, checkpoint)


def test_a_layer_at_several_places_that_were_trained_apart_is_refused(
    export_cli: Callable[..., Finished], module_file: Path
) -> None:
    layer = torch.nn.Linear(8, 8).state_dict()
    trained = {f"{place}.{name}": value.clone() for place in ("first", "last") for name, value in layer.items()}
    # Only weights are tied by DeepSpeed.
    torch.save(trained | {"first.bias": trained["first.bias"] + 0.01}, module_file.parent / "apart.pt")
    spec = {"inputs": {"values": {"shape": ["batch", 8]}}, "outputs": ["result"]}
    done, _ = publish(export_cli, module_file, "Twice", spec, str(module_file.parent / "apart.pt"))
    assert done.code == 1
    assert (
        "the module shares tensors that were trained apart: expected the same values under first.bias, last.bias, "
        "which are one tensor of the module, got several; have the factory build a layer of its own"
    ) in done.err


def test_rows_that_change_one_another_are_never_joined(export_cli: Callable[..., Finished], module_file: Path) -> None:
    done, config = publish(export_cli, module_file, "Centred", VALUES)
    assert done.code == 0, done.err
    assert "rows of a batch change one another's answers" in json.loads(done.out)["served_as"]
    assert config.max_batch_size == 0
    assert not config.HasField("dynamic_batching")
    assert list(config.input[0].dims) == [-1, -1]


def test_tensors_of_which_some_have_no_batch_keep_theirs_as_an_axis(module_file: Path) -> None:
    four = {"inputs": {"values": {"shape": ["batch", 4]}, "weights": {"shape": [4]}}, "outputs": ["sums", "twice"]}
    shared = build(module_file, "Shared", four)
    summary = build(module_file, "Summary", {"inputs": {"values": {"shape": ["batch", 4]}}, "outputs": ["a", "b"]})
    for task, why, dims in (
        (shared, "not every input begins with the batch, so", {"values": [-1, 4], "weights": [4], "sums": [-1, 1]}),
        (summary, "not every output begins with the batch, so", {"values": [-1, 4], "a": [-1, 4], "b": [3]}),
    ):
        assert any(note.startswith(why) for note in task.notes)
        assert list(task.build_cases())
        names = name_models("x", task.signature)
        config = build_configs(names, task.signature, version=1, served=[1])["x"]
        assert config.max_batch_size == 0
        found = {tensor.name: list(tensor.dims) for tensor in (*config.input, *config.output)}
        assert dims.items() <= found.items()
    # And of any signature, so that no reader of a config is told of less than there is.
    values, weights = (
        TensorSignature(name=name, dtype=torch.float32, dims=dims) for name, dims in (("v", (BATCH, 4)), ("w", (4,)))
    )
    mixed = ModelSignature(inputs=(values, weights), outputs=(values,))
    config = build_configs(name_models("x", mixed), mixed, version=1, served=[1])["x"]
    assert [list(tensor.dims) for tensor in (*config.input, *config.output)] == [[-1, 4], [4], [-1, 4]]


def test_numbers_of_16_bits_and_tensors_of_one_a_row_are_served_and_checked(
    export_cli: Callable[..., Finished], module_file: Path
) -> None:
    values, half = {"shape": ["batch", 4]}, {"shape": ["batch", 2], "dtype": "float16"}
    for name, added, outputs in (("Half", half, ["sums", "totals"]), ("Added", {"shape": ["batch"]}, ["sums"])):
        kind = np.dtype(added.get("dtype", "float32"))
        real = {"values": np.ones((3, 4), dtype=np.float32), "added": np.ones((3, *added["shape"][1:]), dtype=kind)}
        np.savez(module_file.parent / "real.npz", **real)
        spec = {"inputs": {"values": values, "added": added}, "outputs": outputs, "samples": "real.npz"}
        entry = ["--factory", f"{module_file}:{name}", "--inputs", str(write_spec(module_file.parent, spec))]
        where = ["--name", name.lower(), "--repository", str(module_file.parent / "models")]
        done = export_cli("run", *entry, *where, "--json")
        assert done.code == 0, done.err
        said = json.loads(done.out)
        assert "not every tensor has an axis beside the batch, so requests are never joined" in said["served_as"]
        assert said["report"]["cases"][-1]["name"] == "samples one by one"
    with running(module_file.parent / "models") as server:
        server.read_until("serving HTTP")
        checked = server.check()
    assert checked.code == 0, checked.err


def test_what_answers_differently_each_time_is_refused(module_file: Path) -> None:
    with pytest.raises(ModelError, match="answers the same input in two ways"):
        build(module_file, "Noisy", VALUES)
    with pytest.raises(ModelError, match="changes itself when it is asked: .* got others in module.asked"):
        build(module_file, "Counting", VALUES)


def test_what_a_trace_would_make_constant_is_refused_by_the_proof(
    export_cli: Callable[..., Finished], module_file: Path
) -> None:
    for name in ("Branching", "Looping"):
        done, _ = publish(export_cli, module_file, name, VALUES)
        assert done.code == 1, name
        assert "error: " in done.err
        assert not (module_file.parent / "models").exists()


def test_the_fast_path_of_attention_is_left_out_and_said_so(
    export_cli: Callable[..., Finished], module_file: Path
) -> None:
    spec = {
        "inputs": {
            "values": {"shape": ["batch", "time", 16]},
            "mask": {"dtype": "int64", "shape": ["batch", "time"], "values": "mask"},
        },
        "outputs": ["states"],
        "dims": {"time": {"max": 32}},
        "samples": "padded.npz",
    }
    # A row that its user padded: there the fast path answers zeros, and the graph does not.
    values = np.random.default_rng(0).standard_normal((3, 9, 16)).astype(np.float32)
    mask = (np.arange(9) < np.array([[9], [4], [6]])).astype(np.int64)
    np.savez(module_file.parent / "padded.npz", values=values, mask=mask)
    done, _ = publish(export_cli, module_file, "Encoder", spec)
    assert done.code == 0, done.err
    *reasons, last = json.loads(done.out)["notes"]
    assert reasons[0].startswith("not exported: ")
    assert last == "exported without torch's fast path, after other ways failed"
    # A further way takes steps of its own: the total grows by what the first way took in vain.
    assert list_steps(done) == [(1, 5), (2, 5), (3, 5), (4, 5), (5, 7), (6, 7), (7, 7)]


@pytest.mark.rarer
def test_a_module_that_only_a_trace_exports_rightly_is_published_with_the_reasons(
    export_cli: Callable[..., Finished], module_file: Path
) -> None:
    spec = {"inputs": {"frames": {"shape": ["batch", "time", 8]}}, "outputs": ["states"]}
    done, _ = publish(export_cli, module_file, "Recurrent", spec)
    assert done.code == 0, done.err
    *reasons, last = json.loads(done.out)["notes"]
    assert reasons[0].startswith("not exported: model.onnx has other outputs than the model")
    assert last == "traced, after other ways failed"
    assert list_steps(done)[-1] == (7, 7)


def test_outputs_may_bear_any_name_and_be_the_same_value(
    export_cli: Callable[..., Finished], module_file: Path
) -> None:
    spec = {"inputs": {"values": {"shape": ["batch", "width"]}}, "outputs": ["same", "add", "val_0", "mul"]}
    done, config = publish(export_cli, module_file, "Colliding", spec)
    assert done.code == 0, done.err
    assert json.loads(done.out)["notes"] == []
    assert [tensor.name for tensor in config.output] == ["same", "add", "val_0", "mul"]


@pytest.mark.rarer
def test_a_graph_that_zeros_break_is_published_without_a_warmup(
    export_cli: Callable[..., Finished], module_file: Path
) -> None:
    spec = {
        "inputs": {"ids": {"dtype": "int64", "shape": ["batch", 4], "values": {"integers": [3, 5]}}},
        "outputs": ["rows"],
    }
    refused, _ = publish(export_cli, module_file, "Third", spec, "--warmup", "16")
    assert refused.code == 1
    assert not (module_file.parent / "models" / "mine").exists()
    done, config = publish(export_cli, module_file, "Third", spec)
    assert done.code == 0, done.err
    (note,) = json.loads(done.out)["notes"]
    assert note.startswith("served without a warmup, ")
    assert not config.model_warmup


def test_real_samples_are_tried_as_well(export_cli: Callable[..., Finished], module_file: Path) -> None:
    folder = module_file.parent
    np.savez(folder / "real.npz", values=np.arange(12, dtype=np.float32).reshape(3, 4))
    spec = {**VALUES, "samples": "real.npz"}
    done, _ = publish(export_cli, module_file, "Looping", {**spec, "inputs": {"values": {"shape": ["batch", 4]}}})
    assert done.code == 0, done.err
    names = [case["name"] for case in json.loads(done.out)["report"]["cases"]]
    assert names[-2:] == ["samples one by one", "samples in one batch"]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("modules.py", "the factory is not valid: expected package.module:function or file.py:function"),
        ("{file}:nothing", "cannot be imported: got AttributeError"),
        ("nowhere.at.all:build", "cannot be imported: got ModuleNotFoundError"),
        ("{file}:MISSING_FILE", "cannot be imported"),
        ("{file}:broken", "broken fails: expected a torch.nn.Module, got RuntimeError: no such file: weights.bin"),
        ("{file}:no_module", "does not build a module: expected a torch.nn.Module, got int"),
    ],
)
def test_a_factory_that_is_none_is_refused(entry: str, message: str, module_file: Path) -> None:
    spec = write_spec(module_file.parent, VALUES)
    with pytest.raises((SettingsError, ModelError), match=message):
        build_factory_task(entry.format(file=module_file), spec, None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"inputs": {}}, "describes no inputs"),
        ({**VALUES, "output": []}, "describes no inputs: .*got output"),
        ({**VALUES, "inputs": {"values": {"shape": [0]}}}, "the shape of values in .* is not valid"),
        (
            {**VALUES, "inputs": {"values": {"shape": ["batch"], "dtype": "complex64"}}},
            "the dtype of values",
        ),
        ({**VALUES, "inputs": {"values": {"shape": ["batch"], "values": "random"}}}, "the values of values in"),
        ({**VALUES, "dims": {"width": {"min": 5, "max": 2}}}, "the range of width in .* is empty"),
        ({**VALUES, "dims": {"width": {"least": 5}}}, "the range of width in .* is not valid"),
        ({**VALUES, "samples": "nowhere.npz"}, "nowhere.npz cannot be read"),
    ],
)
def test_a_description_that_means_nothing_is_refused(content: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=message):
        read_spec(write_spec(tmp_path, content))


def test_a_description_of_brackets_within_brackets_is_refused(tmp_path: Path) -> None:
    (tmp_path / "inputs.json").write_text("[" * 100_000)
    with pytest.raises(SettingsError, match=r"inputs.json cannot be read: expected a JSON file, got maximum recursion"):
        read_spec(tmp_path / "inputs.json")


def test_outputs_that_are_not_there_are_refused(module_file: Path) -> None:
    with pytest.raises(ModelError, match="lacks an output: expected scores, logits, got scores, states"):
        build(module_file, "frames", {**FRAMES, "outputs": ["scores", "logits"]})
    with pytest.raises(ModelError, match="expected 2 tensors: a, b, got Tensor"):
        build(module_file, "Centred", {**VALUES, "outputs": ["a", "b"]})
    with pytest.raises(ModelError, match="cannot take the inputs of .*: expected values"):
        spec = {**FRAMES, "inputs": {"values": {"shape": ["batch", "width", "depth"]}}}
        build(module_file, "frames", spec)
