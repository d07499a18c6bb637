"""The page docs/contracts.md, held against the code on both sides of each wall."""

import json
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import CHECKOUT, Published, load_backend
from rich.console import Console
from trainers.architectures import ARCHITECTURES, save_model
from trainers.picture_models import PICTURE_MODELS
from trainers.task_checkpoints import BUILDERS

from client import parity
from export.option_kinds import MAX_WORKERS
from export.options import ExportRequest
from export.progress import Progress
from export.proof.report_page import PAGE_FILE
from export.repository.config_file import CONFIG_FILE, read_config
from export.repository.contents import CONFIGS_FOLDER, GOLDEN_FILE, REPORT_FILE
from export.repository.lockfile import LOCK_FILE
from export.repository.model_config import UNKNOWN_PARAMETER
from export.repository.names import OWNER_PARAMETER, ModelNames
from export.repository.version import PUBLICATION_FILE, SUMS_FILE
from export.signature import STRING, Contract, TensorSignature
from export.source import load_source
from export.tasks.base import Task
from export.tasks.comparison import ANSWER_TOLERANCES, EMBEDDING_TOLERANCES, TENSOR_TOLERANCES
from export.tasks.golden import KSERVE_DTYPES, build_sample
from export.tasks.pictures.answers import LABELS_FILE
from export.tasks.pictures.images import IMAGE, PICTURE_FILE
from export.tasks.pictures.recipe import Recipe
from export.tasks.sounds.classification import AUDIO, SOUND_FILE
from export.tasks.sounds.recipe import SoundRecipe
from export.tasks.steps import POSTPROCESS_BACKEND, POSTPROCESS_FILE, PREPROCESS_BACKEND
from export.tasks.table import TASKS
from export.tasks.texts.text import TOKENIZER_FILE
from modelyard.recorded_answers import measure_answer
from server.following import model_text, recorded, rollout
from server.following import published as repository_reader
from server.following import sums as sums_reader
from server.following.follower import Following
from server.healing.stubs import Limits
from server.status import Status

PAGE = (CHECKOUT / "docs" / "contracts.md").read_text(encoding="utf-8")


def read_section(heading: str) -> str:
    return PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def read_table(heading: str) -> list[list[str]]:
    """Return the cells of the only table of a section, without its heading."""
    rows = [line for line in read_section(heading).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows[2:]]


# Tasks whose clients send encoded files.
FILES = ("audio-classification", "image-classification", "image-embedding", "image-segmentation", "object-detection")


def words(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@pytest.fixture(scope="module")
def tasks(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Task]:
    """Return a small model of every task that an ensemble serves, by the name of the task."""
    built = {}
    for name in (*sorted(TASKS.keys() & BUILDERS.keys()), "sentence_embedding"):
        folder = tmp_path_factory.mktemp(name) / "checkpoint"
        BUILDERS[name](folder, checkpoint)
        progress = Progress(Console(quiet=True))
        request = ExportRequest(checkpoint=folder, name="contract", repository=folder.parent / "models")
        task = load_source(request, progress).task
        built[task.name] = task
    for name, task_name in (
        ("vit classification", "image-classification"),
        ("clip vision features", "image-embedding"),
        ("wav2vec2 sounds", "audio-classification"),
        ("", "object-detection"),
        ("", "image-segmentation"),
    ):
        folder = tmp_path_factory.mktemp(task_name) / "checkpoint"
        if name:
            save_model(ARCHITECTURES[name], folder)
        else:
            PICTURE_MODELS[task_name](folder)
        request = ExportRequest(checkpoint=folder, name="contract", repository=folder.parent / "models", task=task_name)
        built[task_name] = load_source(request, Progress(Console(quiet=True))).task
    return built


def test_the_repository_is_laid_out_as_drawn(published: Published) -> None:
    (drawn,) = re.findall(r"^```text\n(.*?)^```$", read_section("The repository"), re.MULTILINE | re.DOTALL)
    names = ModelNames(name="sentence_embedding")
    paths = {line.replace("NAME", names.name).replace("/V/", "/1/") for line in drawn.splitlines()}
    there = {
        path.relative_to(published.repository).as_posix() for path in published.repository.rglob("*") if path.is_file()
    }
    of_others = (names.postprocess, PICTURE_FILE, SOUND_FILE, LABELS_FILE)
    assert there == {path for path in paths if not any(other in path for other in of_others)}
    complete = ModelNames(name="NAME", has_postprocess=True)
    assert {path.split("/")[0] for path in drawn.splitlines()} == set(complete.all)


def test_each_file_has_one_name_in_every_room() -> None:
    written = {CONFIG_FILE, GOLDEN_FILE, LOCK_FILE, PAGE_FILE, REPORT_FILE, POSTPROCESS_FILE, TOKENIZER_FILE}
    written |= {PICTURE_FILE, SOUND_FILE, LABELS_FILE}
    rows = {words(file)[0]: (writer, reader) for file, writer, reader in read_table("The repository")}
    assert set(rows) == written | {
        PUBLICATION_FILE,
        SUMS_FILE,
        f"{CONFIGS_FOLDER}/*.pbtxt",
        f"{CONFIGS_FOLDER}/*/*.pbtxt",
    }
    assert model_text.CONFIG_FILE == CONFIG_FILE
    assert repository_reader.GOLDEN_FILE == GOLDEN_FILE
    assert repository_reader.CONFIGS_FOLDER == CONFIGS_FOLDER
    assert (sums_reader.SUMS_FILE, sums_reader.LOCK_FILE) == (SUMS_FILE, LOCK_FILE)
    # What a backend opens, it opens by a name of its own.
    steps = {
        TOKENIZER_FILE: PREPROCESS_BACKEND,
        PICTURE_FILE: PREPROCESS_BACKEND,
        SOUND_FILE: PREPROCESS_BACKEND,
        POSTPROCESS_FILE: POSTPROCESS_BACKEND,
    }
    for file, backend in steps.items():
        code = "".join(path.read_text() for path in (CHECKOUT / "backends" / backend).glob("*.py"))
        assert f'"{file}"' in code
        assert "backends" in rows[file][1]


def test_the_status_port_says_what_is_drawn() -> None:
    (drawn,) = re.findall(r"^```text\n(.*?)^```$", read_section("The status port"), re.MULTILINE | re.DOTALL)
    status = Status(follows=True)
    status.ready = True
    following = Following(active=2, served=1, state="failed", reason="version 2 of NAME cannot be served: ...")
    status.follow("NAME", following)
    assert json.loads(status.render_versions()) == json.loads(drawn)


def describe(tensors: Any, hidden: int) -> list[str]:
    """Return tensors as the page writes them: a number that a task was asked for is K, that of the model hidden."""
    described = []
    for tensor in tensors:
        dims = ["hidden" if dim == hidden else str(dim) for dim in tensor.dims]
        described.append(f"`{tensor.name}` {KSERVE_DTYPES[tensor.dtype]} `[{', '.join(dims)}]`")
    return described


def test_clients_send_and_get_what_the_table_says(tasks: dict[str, Task]) -> None:
    rows = {words(task)[0]: (asked, answered) for task, asked, answered in read_table("What clients send and get")}
    assert rows.keys() == tasks.keys()
    for name, task in tasks.items():
        contract = task.signature.contract
        assert contract is not None
        hidden = contract.outputs[0].dims[1] if contract.outputs[0].name == "EMBEDDING" else -1
        top_k = str(getattr(task, "top_k", ""))
        assert ", ".join(describe(contract.inputs, -1)) == rows[name][0]
        answered = ", ".join(describe(contract.outputs, hidden))
        assert (re.sub(rf", {top_k}([,\]])", r", K\1", answered) if top_k else answered) == rows[name][1], name


def test_the_preprocess_step_makes_the_tensors_of_the_table(tasks: dict[str, Task]) -> None:
    rows = {words(name)[0]: words(dims)[0] for name, dims, _ in read_table("Between the steps")}
    assert [*rows] == [*load_backend("python_preprocess", "tokenization").TENSORS]
    for task in tasks.values():
        contract = task.signature.contract
        assert contract is not None
        assert contract.preprocess == PREPROCESS_BACKEND
        if contract.inputs[0].name in (IMAGE, AUDIO):
            continue
        for tensor in (*task.signature.inputs, *contract.carried):
            dims = [str(dim) for dim in tensor.dims[1:] if dim != "windows"]
            assert (tensor.dtype, f"[{', '.join(dims)}]") == (torch.int64, rows[tensor.name])


def test_the_postprocess_step_knows_the_kinds_and_keys_of_the_table(tasks: dict[str, Task]) -> None:
    rows = {words(kind)[0]: tuple(map(words, cells)) for kind, *cells in read_table("postprocess.json")}
    assert [*rows] == [*load_backend("python_postprocess", "answers").KINDS]
    told = set()
    for task in tasks.values():
        contract = task.signature.contract
        assert contract is not None
        settings = task.postprocess  # type: ignore[attr-defined]
        assert (settings is None) == (contract.postprocess is None)
        if settings is None:
            continue
        assert contract.postprocess == POSTPROCESS_BACKEND
        keys, takes, makes = rows[settings["answers"]]
        told.add(settings["answers"])
        assert [*settings] == ["answers", *keys]
        given = [tensor.name for tensor in (*task.signature.outputs, *contract.passed)]
        assert set(takes) <= set(given)
        assert [tensor.name for tensor in contract.outputs] == makes
    # These are made for modules of one's own alone (tests/export/tasks/test_own_pictures.py).
    assert told | {"keypoints", "suppressed_boxes"} == rows.keys()


def test_a_recipe_of_pictures_has_the_keys_of_the_table() -> None:
    rows = [words(key)[0] for key, _ in read_table("picture.json")]
    assert rows == [field.name for field in fields(Recipe)]
    load_backend("python_preprocess", "sent_file")
    pictures = load_backend("python_preprocess", "pictures")
    page = words(read_section("picture.json"))
    assert {*pictures.MODES, *pictures.FILTERS, *pictures.ROUNDINGS, *pictures.CHANNELS} <= {*page}
    section = read_section("Between the steps")
    assert [name for name in pictures.TENSORS if f"`{name}`" in section] == ["pixel_mask", "geometry"]


def test_a_recipe_of_sounds_has_the_keys_of_the_table() -> None:
    rows = [words(key)[0] for key, _ in read_table("sound.json")]
    assert rows == [field.name for field in fields(SoundRecipe)]


def test_the_server_takes_as_many_threads_as_an_option_may_say() -> None:
    source = (CHECKOUT / "backends" / "python_lean" / "model.py").read_text(encoding="utf-8")
    assert re.findall(r"^_MAX_THREADS = (\d+)$", source, re.MULTILINE) == [str(MAX_WORKERS)]


class Watched(dict[str, Any]):
    """A mapping that remembers which of its keys were read."""

    def __init__(self, content: dict[str, Any]) -> None:
        super().__init__(content)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)


SPANS = np.array([[[-1, -1], [0, 3], [4, 8], [-1, -1]]])
EXAMPLES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "labels": ({"labels": ["a", "b"], "function": "softmax", "top_k": 1}, {"logits": np.array([[0.0, 1.0]])}),
    "entities": (
        {"labels": ["O", "B-PER"], "aggregation": "simple", "ignored": ["O"]},
        {"logits": np.eye(2)[None, [0, 1, 1, 0]], "token_spans": SPANS, "continues_word": np.zeros((1, 4))},
    ),
    "spans": (
        {"top_k": 1, "max_answer_tokens": 15, "has_cls_token": True},
        {
            "span_logits": np.ones((1, 1, 4, 2)),
            "answer_spans": SPANS[None],
            "TEXT_PAIR": np.array([[b"one two."]], dtype=np.object_),
        },
    ),
    "masks": (
        {"mask": "[MASK]", "top_k": 1, "tokens": ["a", "b"]},
        {"top_log_probabilities": np.zeros((1, 2, 2)), "top_token_ids": np.array([[[-1, -1], [1, 0]]])},
    ),
    "keypoints": (
        {"labels": ["nose"], "stride": [4.0, 4.0]},
        {"heatmaps": np.eye(4)[None, None], "geometry": np.array([[1.0, 1.0, 0.0, 0.0, 16.0, 16.0]])},
    ),
    "boxes": (
        {"labels": ["cat"], "top_k": 1, "threshold": 0.5},
        {
            "logits": np.array([[[3.0, 0.0]]]),
            "pred_boxes": np.full((1, 1, 4), 0.5),
            "geometry": np.array([[1.0, 1.0, 0.0, 0.0, 16.0, 16.0]]),
        },
    ),
    "suppressed_boxes": (
        {
            "labels": ["cat", "nothing"],
            "ignored": ["nothing"],
            "format": "cxcywh",
            "unit": [16.0, 16.0],
            "function": "sigmoid",
            "threshold": 0.5,
            "iou_threshold": 0.5,
            "top_k": 1,
            "multi_label": False,
        },
        {
            "logits": np.array([[[3.0, 0.0]]]),
            "boxes": np.full((1, 1, 4), 0.5),
            "geometry": np.array([[1.0, 1.0, 0.0, 0.0, 16.0, 16.0]]),
        },
    ),
    "map": (
        {"labels": ["cat", "sky"], "top_k": 2},
        {"logits": np.eye(2)[None, :, None], "geometry": np.array([[1.0, 1.0, 0.0, 0.0, 16.0, 16.0]])},
    ),
}


@pytest.mark.parametrize("kind", EXAMPLES)
def test_a_kind_of_answers_reads_exactly_what_the_table_says(kind: str) -> None:
    rows = {words(name)[0]: tuple(map(words, cells)) for name, *cells in read_table("postprocess.json")}
    keys, takes, makes = rows[kind]
    settings, tensors = EXAMPLES[kind]
    watched, given = Watched(settings), Watched(tensors)
    # Imported by name, by the answers that need it.
    answers = load_backend("python_postprocess", "answers")
    for module in ("maps", "boxes"):
        load_backend("python_postprocess", module)
    made = answers.KINDS[kind]()(given, watched)
    # The mask's text is for the refusal of a text that has none.
    assert watched.read | ({"mask"} if kind == "masks" else set()) == set(keys) == set(settings)
    assert given.read == set(takes)
    assert [*made] == makes


def read_example() -> dict[str, Any]:
    (code,) = re.findall(r"^```text\n(.*?)^```$", read_section("golden.json"), re.MULTILINE | re.DOTALL)
    example: dict[str, Any] = json.loads(code)
    return example


def test_the_server_and_the_client_read_the_example_of_golden_json(tmp_path: Path) -> None:
    example = read_example()
    path = tmp_path / GOLDEN_FILE
    path.write_text(json.dumps(example))
    outputs = example["samples"][0]["outputs"]
    assert measure_answer(outputs, outputs, recorded.read_golden(path)["tolerances"]) == 0.0
    (sample,) = parity.read_golden(path).samples
    assert sample.inputs["TEXT"].tolist() == [[b"A cat sleeps."]]
    assert sample.outputs["EMBEDDING"].shape == (1, 3)


def test_strings_that_are_not_text_are_written_and_read_in_base64(tmp_path: Path) -> None:
    picture = b"P6 1 1 255 \x00\xff\x80"
    image = TensorSignature(name="IMAGE", dtype=STRING, dims=("batch", 1))
    label = TensorSignature(name="LABEL", dtype=STRING, dims=("batch", 1))
    contract = Contract(inputs=(image,), outputs=(label,), preprocess="python_image_preprocess")
    bounds = {"max_abs_error": 1e-4}
    golden = {"tolerances": bounds, "samples": [build_sample(contract, {"IMAGE": picture}, {"LABEL": "cat"})]}
    (asked,) = golden["samples"][0]["inputs"]
    assert asked["parameters"] == {"encoding": "base64"}
    assert '`"parameters": {"encoding": "base64"}`' in read_section("golden.json")
    path = tmp_path / GOLDEN_FILE
    path.write_text(json.dumps(golden))
    read = parity.read_golden(path)
    assert (read.samples[0].inputs["IMAGE"].tolist(), read.is_text) == ([[picture]], False)
    assert recorded.read_golden(path) == golden


def walk_keys(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            if key != "tolerances":
                yield from walk_keys(item)
    for item in value if isinstance(value, list) else ():
        yield from walk_keys(item)


def test_every_task_writes_a_golden_json_of_that_form(tasks: dict[str, Task], tmp_path: Path) -> None:
    form = list(dict.fromkeys(walk_keys(read_example())))
    for name, task in tasks.items():
        golden = json.loads(json.dumps(task.build_golden()))
        keys = dict.fromkeys(walk_keys(golden))
        is_encoded = keys.pop("parameters", "") is None
        assert ([key for key in keys if key != "encoding"], is_encoded) == (form, name in FILES), name
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(golden))
        assert len(parity.read_golden(path).samples) == len(recorded.read_golden(path)["samples"]) > 1
        contract = task.signature.contract
        assert contract is not None
        for sample in golden["samples"]:
            for tensors, described in (("inputs", contract.inputs), ("outputs", contract.outputs)):
                wanted = [tensor.name for tensor in described if not tensor.is_optional]
                assert [tensor["name"] for tensor in sample[tensors]] == wanted
            for tensor in (*sample["inputs"], *sample["outputs"]):
                assert len(tensor["data"]) == np.prod(tensor["shape"])


def test_the_tolerances_are_those_of_the_table() -> None:
    named = {words(name)[0] for name, _ in read_table("golden.json")}
    assert named == {*EMBEDDING_TOLERANCES, *ANSWER_TOLERANCES, *TENSOR_TOLERANCES}


def test_the_parameters_are_those_of_the_table(published: Published) -> None:
    rows = {words(name)[0]: (writer, reader) for name, writer, reader, _ in read_table("Parameters")}
    limits = {f"modelyard_{limit.name}" for limit in fields(Limits)}
    backends = "".join(path.read_text() for path in (CHECKOUT / "backends").glob("*/*.py"))
    read = set(re.findall(r'"(modelyard_\w+)"', backends))
    assert read == {name for name, (_, reader) in rows.items() if reader == "backends"}
    assert rows.keys() == limits | read | {OWNER_PARAMETER, rollout._REVIVAL_PARAMETER}
    config = read_config(published.repository / "sentence_embedding_model")
    assert config is not None
    assert {name for name in config.parameters if name.startswith("modelyard_")} == {
        name for name, (writer, _) in rows.items() if writer == "export" and name != UNKNOWN_PARAMETER
    }, "the unknown token is of entities alone"
