"""One process in place of an ensemble's steps: the same names, answers and refusals, the same care when it dies."""

import functools
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from harness import Finished, load_backend, run
from launcher import Running, running
from rich.console import Console
from trainers.task_checkpoints import BUILDERS, SENTENCES
from tritonclient.utils import InferenceServerException

from export.artefacts import Artefacts, hash_file, list_model
from export.engines.engine import VerifiedGraph
from export.engines.table import ENGINES, ONNXRUNTIME, Engine
from export.options import ExportRequest
from export.progress import Progress
from export.proof.verify import VerificationReport
from export.repository.config_file import parse_config, render_config
from export.repository.model_config import name_models
from export.repository.publication import publish
from export.source import load_source
from export.stages import write_files
from export.targets import DEFAULT_TARGET
from export.tasks.base import Task

# Rows of one request run alone here and padded there, in fp32.
TOLERANCE = 1e-4
WITHIN_S = 120.0

PAIRS = [("Who was it?", SENTENCES[0]), ("Who never came?", " ".join(SENTENCES * 5)), ("When?", "x"), ("Where?", "😀 ")]
TEXTS = [*SENTENCES, "", "Grüße aus Köln, sagt Ada Lovelace: 😀 London!", "ALAN TURING saw Alan Turing. " * 20, "a"]
ROWS: dict[str, list[tuple[str, ...]]] = {
    "fill-mask": [("Ada [MASK] lived.",), ("The train from [MASK] was [MASK] again.",), ("[MASK]",)],
    "question-answering": PAIRS,
    "sentence_embedding": [(text,) for text in TEXTS],
}
OPENVINO = ("question-answering", "sentence_embedding")
SHORT_QUEUE = 2

# What the ensembles pad to whose names begin with `padded_`.
LENGTHS = (16, 64)


@dataclass(frozen=True)
class Model:
    """What was published under two names."""

    task: Task
    files: Artefacts
    report: VerificationReport
    engine: Engine


@dataclass(frozen=True)
class Served:
    """The server, and what it serves."""

    server: Running
    repository: Path
    models: dict[str, Model]


def write_lean(task: Task, files: Artefacts, folder: Path) -> Artefacts:
    """Have the task be a lean one from now on, and return its files around the same graph."""
    contract = task.signature.contract
    assert contract
    task.signature = replace(task.signature, contract=replace(contract, is_lean=True))
    steps = {}
    for step, contents in task.step_files.items():
        (folder / step).mkdir(parents=True)
        steps[step] = tuple(folder / step / name for name in contents)
        for path in steps[step]:
            path.write_bytes(contents[path.name])
    return replace(files, steps=steps)


def publish_as(name: str, model: Model, repository: Path) -> None:
    names = name_models(name, model.task.signature)
    report = replace(model.report, sha256={path.name: hash_file(path) for path in model.files.all})
    signature = model.task.signature
    publish(
        repository=repository, names=names, signature=signature, files=model.files, report=report, engine=model.engine
    )


@pytest.fixture(scope="module")
def served(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("lean")
    repository, models = directory / "models", {}
    for name in ROWS:
        BUILDERS[name](directory / name, checkpoint)
        request = ExportRequest(checkpoint=directory / name, name=name, repository=repository)
        task = load_source(request, Progress(Console(quiet=True))).task
        files = write_files(task, directory / f"{name}.files", DEFAULT_TARGET)
        golden, tolerances = task.build_golden(), task.tolerances
        report = VerificationReport(
            sha256={}, cases=[], golden=golden, tolerances=tolerances, texts_tokenized=0, target=DEFAULT_TARGET.release
        )
        publish_as(name, Model(task, files, report, ONNXRUNTIME), repository)
        plain = task.signature
        assert plain.contract
        task.signature = replace(plain, contract=replace(plain.contract, lengths=LENGTHS))
        publish_as(f"padded_{name}", Model(task, files, report, ONNXRUNTIME), repository)
        task.signature = plain
        lean = write_lean(task, files, directory / f"{name}.lean")
        models[f"lean_{name}"] = Model(task, lean, report, ONNXRUNTIME)
        if name not in OPENVINO:
            continue
        engine = ENGINES["openvino"]
        graph = VerifiedGraph(path=files.graph, signature=task.signature, precision="fp32", target=DEFAULT_TARGET)
        (directory / f"{name}.openvino").mkdir()
        engine.build(graph, directory / f"{name}.openvino")
        built = replace(lean, model=list_model(directory / f"{name}.openvino" / engine.model_file))
        models[f"openvino_{name}"] = Model(task, built, report, engine)
    for name, model in models.items():
        publish_as(name, model, repository)
    config = repository / "lean_question-answering" / "config.pbtxt"
    config.write_text(config.read_text().replace("max_queue_size: 256", f"max_queue_size: {SHORT_QUEUE}"))
    with running(repository) as server:
        server.read_until("serving HTTP")
        server.follow()
        yield Served(server, repository, models)


def build_inputs(library: Any, rows: Sequence[tuple[str, ...]], **options: Any) -> list[Any]:
    inputs = []
    for name, column in zip(("TEXT", "TEXT_PAIR"), zip(*rows, strict=True), strict=False):
        tensor = library.InferInput(name, [len(rows), 1], "BYTES")
        tensor.set_data_from_numpy(np.array([[text.encode()] for text in column], dtype=np.object_), **options)
        inputs.append(tensor)
    return inputs


def ask(server: Running, name: str, rows: Sequence[tuple[str, ...]], transport: str = "json") -> dict[str, np.ndarray]:
    if transport == "grpc":
        with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
            answer = client.infer(name, build_inputs(tritonclient.grpc, rows))
            names = [output.name for output in answer.get_response().outputs]
    else:
        options = {"network_timeout": WITHIN_S, "connection_timeout": WITHIN_S}
        with tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.http}", **options) as client:
            is_binary = transport == "binary"
            inputs = build_inputs(tritonclient.http, rows, binary_data=is_binary)
            described = client.get_model_metadata(name)["outputs"]
            wanted = [tritonclient.http.InferRequestedOutput(o["name"], binary_data=is_binary) for o in described]
            answer = client.infer(name, inputs, outputs=wanted)
            names = [output["name"] for output in answer.get_response()["outputs"]]
    return {output: answer.as_numpy(output) for output in names}


def decode(values: np.ndarray) -> list[Any]:
    return [value.decode() if isinstance(value, bytes) else value for value in values.reshape(-1).tolist()]


def assert_same(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert got.keys() == expected.keys()
    for name, values in expected.items():
        assert got[name].shape == values.shape, name
        if values.dtype.kind == "f":
            assert np.abs(got[name] - values).max(initial=0) < TOLERANCE, name
        else:
            assert decode(got[name]) == decode(values), name


@pytest.mark.parametrize("name", ROWS)
def test_texts_of_many_lengths_become_tensors_of_few_and_are_answered_alike(served: Served, name: str) -> None:
    sizes = set()
    for row in ROWS[name]:
        assert_same(ask(served.server, f"padded_{name}", [row]), ask(served.server, name, [row]))
        plain, padded = (
            ask(served.server, f"{prefix}{name}_preprocess", [row])["input_ids"].shape[-1] for prefix in ("", "padded_")
        )
        assert padded == next((length for length in LENGTHS if length >= plain), plain)
        sizes |= {(plain, padded)}
    assert len({padded for _, padded in sizes}) <= len(LENGTHS) + 1
    assert any(plain < padded for plain, padded in sizes)


@pytest.mark.parametrize("transport", ["json", "binary", "grpc"])
@pytest.mark.parametrize("name", ROWS)
def test_clients_are_answered_as_by_the_ensemble(served: Served, name: str, transport: str) -> None:
    expected = ask(served.server, name, ROWS[name], transport)
    for layout in ("lean", *(["openvino"] if name in OPENVINO else [])):
        assert_same(ask(served.server, f"{layout}_{name}", ROWS[name], transport), expected)


@pytest.mark.parametrize("layout", ["lean", "openvino"])
def test_each_caller_gets_its_own_row_whatever_is_asked_beside_it(served: Served, layout: str) -> None:
    texts = [" ".join([f"number {index}", *["more"] * (index % 41)]) for index in range(200)]
    alone = ask(served.server, "sentence_embedding", [(text,) for text in texts[:32]])["EMBEDDING"]

    def embed(index: int) -> np.ndarray | str:
        rows: list[tuple[Any, ...]] = [(texts[index],)]
        try:
            if index % 10 == 9:
                rows = [(texts[index],), (b"\xff".decode("utf-8", "surrogateescape"),)]
                return ask_bytes(served.server, f"{layout}_sentence_embedding", [texts[index].encode(), b"\xff"])
            return ask(served.server, f"{layout}_sentence_embedding", rows, ("json", "binary", "grpc")[index % 3])[
                "EMBEDDING"
            ][0]
        except InferenceServerException as exc:
            return str(exc)

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(embed, range(len(texts))))
    for index, answer in enumerate(answers):
        if index % 10 == 9:
            assert "TEXT row 1 is not UTF-8: expected valid bytes, got 0xff" in answer
        elif index < len(alone):
            assert np.abs(answer - alone[index]).max() < TOLERANCE
        else:
            assert isinstance(answer, np.ndarray), answer


def ask_bytes(server: Running, name: str, texts: list[bytes]) -> np.ndarray:
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
        tensor = tritonclient.grpc.InferInput("TEXT", [len(texts), 1], "BYTES")
        tensor.set_data_from_numpy(np.array([[text] for text in texts], dtype=np.object_))
        return client.infer(name, [tensor]).as_numpy("EMBEDDING")


REFUSED = {
    "fill-mask": ([("a [MASK]",), ("none",)], "TEXT row 1 has no mask"),
    "question-answering": ([("why " * 100, "because")], "TEXT leaves no room for TEXT_PAIR"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_answered_is_refused_as_by_the_ensemble(served: Served, name: str) -> None:
    rows, words = REFUSED[name]
    told = []
    for model in (name, f"lean_{name}"):
        with pytest.raises(InferenceServerException, match=words) as caught:
            ask(served.server, model, rows, "grpc")
        told.append((caught.value.status(), caught.value.message().removeprefix(f"in ensemble '{name}', ")))
    assert told[0] == told[1]


def test_a_full_queue_refuses_and_a_cancelled_request_leaves_it(served: Served) -> None:
    name, inputs = "lean_question-answering", build_inputs(tritonclient.grpc, [("Who?", "word " * 600)] * 32)
    told: list[str] = []
    ended = threading.Semaphore(0)

    def note(result: Any, error: InferenceServerException | None) -> None:
        told.append(str(error.status()) if error else "answered")
        ended.release()

    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{served.server.grpc}") as client:
        calls = [client.async_infer(name, inputs, functools.partial(note)) for _ in range(64)]
        calls[-1].cancel()
        for call in calls:
            assert ended.acquire(timeout=WITHIN_S), call
    assert {"answered", "StatusCode.UNAVAILABLE", "StatusCode.CANCELLED"} >= set(told)
    assert told.count("answered") >= SHORT_QUEUE
    assert "StatusCode.UNAVAILABLE" in told
    ask(served.server, name, ROWS["question-answering"])


def test_a_killed_process_is_replaced_and_its_requests_end(served: Served) -> None:
    name = "lean_sentence_embedding"
    expected = ask(served.server, name, ROWS["sentence_embedding"])
    ends: list[str] = []
    stop = threading.Event()

    def keep_asking() -> None:
        while not stop.is_set():
            try:
                ask(served.server, name, ROWS["sentence_embedding"])
                ends.append("answered")
            except InferenceServerException:
                ends.append("refused")

    threads = [threading.Thread(target=keep_asking) for _ in range(4)]
    for thread in threads:
        thread.start()
    stubs = served.server.find_stubs(name)
    assert len(stubs) == 2
    os.kill(stubs[0].pid, signal.SIGKILL)
    served.server.wait_for_line(f"{name}: answers again", WITHIN_S)
    stop.set()
    for thread in threads:
        # Every request ended, those of the dead process as well.
        thread.join(WITHIN_S)
        assert not thread.is_alive()
    wait_for(lambda: len(served.server.find_stubs(name)) == 2)
    assert_same(ask(served.server, name, ROWS["sentence_embedding"]), expected)


def test_another_version_is_rolled_out_without_a_lost_request(served: Served) -> None:
    name = "lean_fill-mask"
    lost: list[str] = []
    stop = threading.Event()

    def keep_asking() -> None:
        while not stop.is_set():
            try:
                ask(served.server, name, ROWS["fill-mask"])
            except InferenceServerException as exc:
                lost.append(str(exc))

    thread = threading.Thread(target=keep_asking)
    thread.start()
    model = served.models[name]
    publish_as(
        name, replace(model, report=replace(model.report, accepted_worse={"reason": "a test"})), served.repository
    )
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{served.server.http}") as client:
        wait_for(lambda: client.get_model_metadata(name)["versions"] == ["2"])
    stop.set()
    thread.join(WITHIN_S)
    assert not lost


def wait_for(is_reached: Callable[[], bool]) -> None:
    end = time.monotonic() + WITHIN_S
    while not is_reached():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_tensors_of_another_shape_are_refused_by_row_and_not_filled_up() -> None:
    load_backend("python_postprocess", "answers")
    load_backend("python_lean", "engines")
    find_unlike = load_backend("python_lean", "lean").find_unlike
    alike, other = {"maps": np.zeros((2, 1, 4))}, {"maps": np.zeros((1, 1, 3))}
    assert find_unlike([([0, 2], alike), ([3], {"maps": np.zeros((1, 1, 4))})], "IMAGE") == []
    (error,) = find_unlike([([0, 2], alike), ([1], other)], "IMAGE")
    assert error.row == 1
    assert str(error).startswith("IMAGE row 1 has answers of another shape than row 0: expected {'maps': [1, 4]}, got")


def test_an_engine_computes_with_as_many_threads_as_it_is_told(served: Served) -> None:
    graph = served.models["lean_sentence_embedding"].files.graph
    open_onnxruntime = load_backend("python_lean", "engines").open_onnxruntime
    kept, counts = [], []
    for threads in (1, 3):
        before = {*Path("/proc/self/task").iterdir()}
        kept.append(open_onnxruntime(graph, threads)[0])
        # One of the others may end meanwhile.
        counts.append(len({*Path("/proc/self/task").iterdir()} - before))
    # The caller's own thread is one of them.
    assert counts == [0, 2]


@pytest.mark.parametrize("text", ["two", "0", "100000"])
def test_a_number_of_threads_that_is_none_is_refused(text: str, served: Served, tmp_path: Path) -> None:
    folder = served.repository / "lean_sentence_embedding"
    shutil.copytree(folder, tmp_path / "models" / folder.name)
    config = parse_config((folder / "config.pbtxt").read_text())
    config.parameters["modelyard_threads"].string_value = text
    (tmp_path / "models" / folder.name / "config.pbtxt").write_text(render_config(config))
    with running(tmp_path / "models") as server:
        assert server.finish() != 0
    said = "\n".join(server.lines)
    assert f"expected a number of threads in the parameter modelyard_threads, from 1 to 1024, got {text!r}" in said


def test_a_task_or_an_engine_without_such_a_process_is_refused(export_cli: Callable[..., Finished]) -> None:
    done = export_cli("run", "nowhere", "--name", "x", "--engine", "tensorrt", "--steps", "lean")
    assert done.code != 0
    assert "--steps lean has no effect with --engine tensorrt: expected one of onnxruntime, openvino" in done.err


def test_lean_json_holds_what_the_contracts_say(served: Served) -> None:
    page = (
        (Path(__file__).parents[3] / "docs" / "contracts.md").read_text(encoding="utf-8").split("\n## lean.json\n")[1]
    )
    keys = [line.split("`")[1] for line in page.split("\n## ")[0].splitlines() if line.startswith("| `")]
    assert keys == [*json.loads((served.repository / "lean_fill-mask" / "1" / "lean.json").read_text())]


@pytest.mark.rarer
def test_clients_find_a_lone_lean_model(checkpoint: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models"
    exported = run(
        "-m", "export", "run", str(checkpoint), "--name", "alone", "--repository", str(repository), "--steps", "lean"
    )
    assert exported.code == 0, exported.err
    with running(repository) as server:
        server.read_until("serving HTTP")
        done = run("client/infer.py", "--url", f"localhost:{server.http}", "--text", "hello", "--json")
    assert done.code == 0, done.err
    assert "embedding" in done.out.lower()
