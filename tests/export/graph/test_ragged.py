"""Requests of different lengths in one run: what is published, what is refused, and what the server then runs."""

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import tritonclient.grpc.aio
from harness import Finished, load_backend, run
from launcher import running
from transformers import AlbertConfig, AlbertModel, BertConfig, BertForTokenClassification
from tritonclient.utils import InferenceServerException

from export.errors import SettingsError
from export.options import ExportRequest
from export.repository.config_file import parse_config

Cli = Callable[..., Finished]

NAME = "joined"


@pytest.fixture(scope="module")
def joined(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a repository with a model whose requests wait a second for others of any length."""
    repository = tmp_path_factory.mktemp("ragged") / "models"
    options = ["--batching", "padding-free", "--max-queue-delay-microseconds", "1000000"]
    done = run("-m", "export", "run", str(tiny_checkpoint), "--name", NAME, "--repository", str(repository), *options)
    assert done.code == 0, done.err
    assert "verifying rows of different lengths against the checkpoint" in done.err
    assert "requests of any lengths" in done.out
    assert "Note: not exported" not in done.out
    return repository


def test_the_files_are_what_native_backends_ask_for(joined: Path) -> None:
    folder = joined / f"{NAME}_model"
    config = parse_config((folder / "config.pbtxt").read_text())
    assert [tensor.allow_ragged_batch for tensor in config.input] == [True] * 3
    assert [warmup.name.split(",")[0] for warmup in config.model_warmup] == ["shortest", "longest"]
    (made,) = config.batch_input
    assert (made.kind, list(made.source_input)) == (made.BATCH_ITEM_SHAPE, [config.input[0].name])
    graph = onnx.load(folder / "1" / "model.onnx").graph
    dims = {value.name: len(value.type.tensor_type.shape.dim) for value in graph.input}
    assert dims == {tensor.name: 1 for tensor in config.input} | {made.target_name[0]: 2}


def test_32_requests_of_14_lengths_run_in_at_most_4_executions(joined: Path) -> None:
    random = np.random.default_rng(0)
    rows = [random.integers(1000, 30000, 1 + number % 14) for number in range(32)]

    async def ask_all(address: str) -> tuple[int, list[np.ndarray]]:
        async with tritonclient.grpc.aio.InferenceServerClient(address) as client:

            async def ask(ids: np.ndarray) -> np.ndarray:
                values = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
                inputs = []
                for name, array in values.items():
                    inputs.append(tritonclient.grpc.InferInput(name, [1, len(ids)], "INT64"))
                    inputs[-1].set_data_from_numpy(array[np.newaxis])
                return (await client.infer(f"{NAME}_model", inputs)).as_numpy("sentence_embedding")[0]

            async def count() -> int:
                statistics = await client.get_inference_statistics(f"{NAME}_model", as_json=True)
                return int(statistics["model_stats"][0]["execution_count"])

            async def ask_wrongly() -> None:
                """One whose mask is longer than its ids, which would shift whoever is joined behind it."""
                sizes = {"input_ids": 2, "attention_mask": 3, "token_type_ids": 2}
                inputs = [tritonclient.grpc.InferInput(name, [1, size], "INT64") for name, size in sizes.items()]
                for each, size in zip(inputs, sizes.values(), strict=True):
                    each.set_data_from_numpy(np.ones((1, size), dtype=np.int64))
                with pytest.raises(InferenceServerException, match="attention_mask has another shape than input_ids"):
                    await client.infer(f"{NAME}_model", inputs)

            before = await count()
            together = await asyncio.gather(*map(ask, rows))
            runs = await count() - before
            beside = await asyncio.gather(*map(ask, rows), *(ask_wrongly() for _ in range(8)))
            return runs, [*together, *beside[: len(rows)]]

    with running(joined) as server:
        server.read_until("serving HTTP")
        server.follow()
        runs, together = asyncio.run(ask_all(f"127.0.0.1:{server.grpc}"))
    assert 1 <= runs <= 4
    session = onnxruntime.InferenceSession(joined / f"{NAME}_model" / "1" / "model.onnx")
    flat = {"input_ids": rows[0], "attention_mask": np.ones(len(rows[0]) + 1, np.int64)}
    flat |= {"token_type_ids": np.zeros_like(rows[0]), "row_shapes": np.array([[len(rows[0])]], dtype=np.int32)}
    # Whatever joins them: a native backend compares nothing.
    with pytest.raises(Exception, match="Reshape"):
        session.run(None, flat)
    for ids, vector in zip([*rows, *rows], together, strict=True):
        values = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
        (alone,) = session.run(None, values | {"row_shapes": np.array([[len(ids)]], dtype=np.int32)})
        assert np.abs(vector - alone[0]).max() <= 1e-5


@pytest.mark.rarer
def test_a_running_server_is_not_moved_to_another_batching_and_says_why(
    joined: Path, tiny_checkpoint: Path, tmp_path: Path, export_cli: Cli
) -> None:
    models = Path(shutil.copytree(joined, tmp_path / "models"))
    here = ["--repository", str(models)]
    done = export_cli("run", str(tiny_checkpoint), "--name", NAME, *here, "--no-activate")
    assert done.code == 0, done.err
    with running(models) as server:
        server.read_until("serving HTTP")
        server.follow()
        done = export_cli("activate", NAME, "2", *here, "--wait", f"localhost:{server.status}")
        assert done.code == 3
        assert f"versions 1 and 2 of {NAME}_model cannot be loaded side by side" in done.err
        assert "restart the server" in done.err and "version 1 is served as before" in done.err
    with running(models) as server:
        server.read_until("ready, answers as verified")
        assert f"{NAME}" in server.lines[-1] and "version 2" in server.lines[-1]


@pytest.mark.rarer
def test_a_model_that_computes_its_own_attention_pads_and_says_why(
    tiny_checkpoint: Path, tmp_path: Path, export_cli: Cli
) -> None:
    checkpoint = Path(shutil.copytree(tiny_checkpoint, tmp_path / "albert"))
    config = AlbertConfig(
        vocab_size=30522,
        embedding_size=8,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
    )
    AlbertModel(config).save_pretrained(checkpoint)
    words = ["run", str(checkpoint), "--name", "albert", "--repository", str(tmp_path / "models")]
    done = export_cli(*words, "--batching", "padding-free", "--json")
    assert done.code == 0, done.err
    notes = json.loads(done.out)["notes"]
    assert notes[0].startswith("not exported without padding: AlbertModel cannot be computed without padding:")
    assert notes[1] == "exported, after other ways failed"
    parts = parse_config((tmp_path / "models" / "albert_model" / "config.pbtxt").read_text())
    assert parts.input[0].allow_ragged_batch


def test_a_task_whose_answers_are_as_long_as_the_text_is_refused(
    tiny_checkpoint: Path, tmp_path: Path, export_cli: Cli
) -> None:
    checkpoint = Path(shutil.copytree(tiny_checkpoint, tmp_path / "tagger"))
    BertForTokenClassification(BertConfig.from_pretrained(checkpoint)).save_pretrained(checkpoint)
    done = export_cli("run", str(checkpoint), "--name", "x", "--repository", str(tmp_path), "--batching", "ragged")
    assert done.code == 1
    assert "error: --batching ragged has no effect on token-classification: expected a task with one answer" in done.err


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"steps": "lean"}, "--batching ragged has no effect with --steps lean: expected --steps ensemble"),
        ({"lengths": (32,)}, "--lengths has no effect with --batching ragged: expected one way"),
        ({"engine": "openvino"}, "--batching ragged has no effect with --engine openvino: expected one of onnxruntime"),
        ({"engine": "auto"}, "--batching ragged has no effect with --engine auto: expected one of onnxruntime"),
    ],
)
def test_what_would_have_no_effect_is_refused(options: dict, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=sentence):
        ExportRequest(checkpoint=tmp_path, name="x", batching="ragged", **options)


# Of a request of two rows of three and one of a row of two, as `model_config.proto` describes each kind.
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("BATCH_ELEMENT_COUNT", [6, 2]),
        ("BATCH_ACCUMULATED_ELEMENT_COUNT", [6, 8]),
        ("BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO", [0, 6, 8]),
        ("BATCH_ITEM_SHAPE", [[3], [3], [2]]),
        ("BATCH_ITEM_SHAPE_FLATTEN", [3, 3, 2]),
    ],
)
def test_the_stand_in_makes_of_a_batch_what_the_native_backend_makes(kind: str, expected: list) -> None:
    made = {"kind": kind, "target_name": ["M"], "data_type": "TYPE_INT32", "source_input": ["X"]}
    config = {"name": "m", "input": [{"name": "X", "allow_ragged_batch": True}], "batch_input": [made]}
    feeds = [{"X": np.arange(6).reshape(2, 3)}, {"X": np.array([[6, 7]])}]
    joined = load_backend("onnxruntime", "ragged").Joiner(config).join(feeds)
    assert joined["X"].tolist() == list(range(8))
    assert joined["M"].dtype == np.int32
    assert joined["M"].tolist() == expected


def test_the_longest_is_told_by_a_shape_alone() -> None:
    made = {
        "kind": "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE",
        "target_name": ["M"],
        "data_type": "TYPE_FP32",
        "source_input": ["X"],
    }
    config = {"name": "m", "input": [{"name": "X", "allow_ragged_batch": True}], "batch_input": [made]}
    feeds = [{"X": np.zeros((1, 5))}, {"X": np.zeros((1, 2))}]
    assert load_backend("onnxruntime", "ragged").Joiner(config).join(feeds)["M"].shape == (5,)


def test_a_request_whose_inputs_differ_in_length_is_refused_before_it_moves_its_neighbours() -> None:
    made = {"kind": "BATCH_ITEM_SHAPE", "target_name": ["S"], "data_type": "TYPE_INT32", "source_input": ["X"]}
    inputs = [{"name": name, "allow_ragged_batch": True} for name in ("X", "MASK")]
    joiner = load_backend("onnxruntime", "ragged").Joiner({"name": "m", "input": inputs, "batch_input": [made]})
    good = {"X": np.zeros((1, 4)), "MASK": np.ones((1, 4))}
    assert joiner.join([good, good])["MASK"].shape == (8,)
    with pytest.raises(ValueError, match=r"MASK has another shape than X: expected \[1, 2\], got \[1, 3\]"):
        joiner.join([good, {"X": np.zeros((1, 2)), "MASK": np.ones((1, 3))}])
    # Each told for itself, they may differ.
    own = made | {"target_name": ["T"], "source_input": ["MASK"]}
    joiner = load_backend("onnxruntime", "ragged").Joiner({"name": "m", "input": inputs, "batch_input": [made, own]})
    assert joiner.join([{"X": np.zeros((1, 2)), "MASK": np.ones((1, 3))}])["T"].tolist() == [[3]]
