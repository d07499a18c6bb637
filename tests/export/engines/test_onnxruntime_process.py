import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from harness import CHECKOUT, Exported, needs_newest
from onnx import TensorProto, helper

from export.engines import onnxruntime_process
from export.engines.onnxruntime_process import TensorInfo, fetch_runtime, open_runtime
from export.errors import RuntimeFailure
from export.targets import Target, find_target

# What the same graph may compute otherwise under another ONNX Runtime: fp32 sums in another order.
TOLERANCE = 1e-5


# Whose ONNX Runtime is installed, and two whose wheels are fetched.
OLDEST, MIDDLE, NEWEST = (find_target(release) for release in ("24.10", "25.08", "26.07"))


def save(path: Path, nodes: list[onnx.NodeProto], inputs: Sequence, outputs: Sequence, **options: object) -> Path:
    """Write a small graph; inputs and outputs are names, element types and shapes."""
    sides = [[helper.make_tensor_value_info(*tensor) for tensor in side] for side in (inputs, outputs)]
    graph = helper.make_graph(nodes, "main", *sides)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("local", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10, **options), path)
    return path


def save_identity(path: Path, element_type: int = TensorProto.FLOAT) -> Path:
    tensors = [(name, element_type, ["batch", 2]) for name in ("x", "y")]
    return save(path, [helper.make_node("Identity", ["x"], ["y"])], tensors[:1], tensors[1:])


def save_endless(path: Path) -> Path:
    """A loop that nobody will see the end of."""
    values = [helper.make_tensor_value_info(n, TensorProto.INT64, []) for n in ("i", "value", "next")]
    flags = [helper.make_tensor_value_info(name, TensorProto.BOOL, []) for name in ("go", "still")]
    body = helper.make_graph(
        [helper.make_node("Add", ["value", "i"], ["next"]), helper.make_node("Identity", ["go"], ["still"])],
        "body",
        [values[0], flags[0], values[1]],
        [flags[1], values[2]],
    )
    loop = helper.make_node("Loop", ["x", "", "x"], ["y"], body=body)
    return save(path, [loop], [("x", TensorProto.INT64, [])], [("y", TensorProto.INT64, [])])


ENDLESS = {"x": np.array(2**62)}

DTYPES = [
    "float16",
    "float32",
    "float64",
    "bool",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
]


@pytest.mark.parametrize(
    "target", [OLDEST, MIDDLE, pytest.param(NEWEST, marks=needs_newest)], ids=["24.10", "25.08", "26.07"]
)
def test_a_real_graph_gives_the_same_answers_under_every_targets_runtime(exported: Exported, target: Target) -> None:
    session = onnxruntime.InferenceSession(str(exported.model_file))
    names = [item.name for item in session.get_outputs()]
    rng = np.random.default_rng(0)
    with open_runtime(target) as runtime:
        other = runtime.load(exported.model_file)
        assert [item.name for item in other.inputs] == [item.name for item in session.get_inputs()]
        assert [item.name for item in other.outputs] == names
        for rows, seq_len in ((1, 1), (2, 7), (5, 64)):
            ids = rng.integers(0, 30522, (rows, seq_len))
            feeds = {item.name: ids if item.name == "input_ids" else np.ones_like(ids) for item in other.inputs}
            for expected, got in zip(session.run(names, feeds), other.run(names, feeds), strict=True):
                assert got.dtype == expected.dtype
                np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE)


def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    with open_runtime(MIDDLE) as runtime:
        for dtype in DTYPES:
            element_type = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
            session = runtime.load(save_identity(tmp_path / f"{dtype}.onnx", element_type))
            for rows in (0, 1, 3):
                value = rng.integers(0, 100, (rows, 2)).astype(dtype)
                [got] = session.run(["y"], {"x": value})
                assert (got.dtype, got.shape, got.tobytes()) == (value.dtype, value.shape, value.tobytes())
        session = runtime.load(save_identity(tmp_path / "strided.onnx"))
        strided = np.arange(12, dtype=np.float32).reshape(2, 6).T[::3]
        np.testing.assert_array_equal(session.run(["y"], {"x": strided})[0], strided)


def test_arrays_much_larger_than_a_pipe_go_both_ways(tmp_path: Path) -> None:
    value = np.random.default_rng(0).random((5_000_000, 2), dtype=np.float32)
    with open_runtime(MIDDLE) as runtime:
        [got] = runtime.load(save_identity(tmp_path / "model.onnx")).run(["y"], {"x": value})
    np.testing.assert_array_equal(got, value)


def test_small_runs_cost_little(tmp_path: Path) -> None:
    value = np.zeros((2, 2), dtype=np.float32)
    with open_runtime(MIDDLE) as runtime:
        session = runtime.load(save_identity(tmp_path / "model.onnx"))
        times = []
        for _ in range(200):
            start = time.perf_counter()
            session.run(["y"], {"x": value})
            times.append(time.perf_counter() - start)
    # 30 us on a quiet machine; the median, for a busy one.
    assert sorted(times)[100] < 1e-3


def test_several_models_live_in_one_process_and_can_be_closed(tmp_path: Path) -> None:
    value = np.ones((1, 2), dtype=np.float32)
    with open_runtime(MIDDLE) as runtime:
        first, second = (runtime.load(save_identity(tmp_path / f"{name}.onnx")) for name in "ab")
        assert first.inputs == [TensorInfo(name="x", type="tensor(float)", shape=("batch", 2))]
        first.close()
        first.close()
        with pytest.raises(
            RuntimeFailure, match=r"cannot run a\.onnx: expected a file that is loaded, got a closed one"
        ):
            first.run(["y"], {"x": value})
        np.testing.assert_array_equal(second.run(["y"], {"x": value})[0], value)


def test_external_data_beside_the_model_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    path = Path("model/model.onnx")
    weight = onnx.numpy_helper.from_array(np.arange(2048, dtype=np.float32), "w")
    node = helper.make_node("Add", ["x", "w"], ["y"])
    save(path, [node], [("x", TensorProto.FLOAT, [1])], [("y", TensorProto.FLOAT, [2048])])
    model = onnx.load(path)
    model.graph.initializer.append(weight)
    onnx.save(model, path, save_as_external_data=True, location="model.onnx.data")
    assert Path("model/model.onnx.data").is_file()
    with open_runtime(MIDDLE) as runtime:
        [got] = runtime.load(path).run(["y"], {"x": np.ones(1, dtype=np.float32)})
    np.testing.assert_array_equal(got, np.arange(2048, dtype=np.float32) + 1)


def test_a_file_that_cannot_be_loaded_is_refused_in_one_sentence(tmp_path: Path) -> None:
    path = save_identity(tmp_path / "model.onnx")
    model = onnx.load(path)
    model.ir_version = 14
    onnx.save(model, path)
    with open_runtime(MIDDLE) as runtime, pytest.raises(RuntimeFailure) as caught:
        runtime.load(path)
    assert str(caught.value) == (
        f"the ONNX Runtime 1.23.0 of Triton 25.08 cannot load model.onnx: got Load model from {path} failed:"
        "Unsupported model IR version: 14, max supported IR version: 11."
    )


def test_inputs_that_do_not_fit_are_refused_and_the_session_goes_on(tmp_path: Path) -> None:
    value = np.ones((1, 2), dtype=np.float32)
    with open_runtime(MIDDLE) as runtime:
        session = runtime.load(save_identity(tmp_path / "model.onnx"))
        for outputs, feeds, reason in (
            (["y"], {}, r"cannot run model\.onnx: got Required inputs"),
            (["z"], {"x": value}, "Invalid output name:z"),
            (["y"], {"x": value.astype(np.float64)}, "Unexpected input data type"),
            (["y"], {"x": value[:, :1]}, "Got invalid dimensions for input: x"),
            (["y"], {"x": value.astype(object)}, "expected numbers in every input, got Python objects in x"),
        ):
            with pytest.raises(RuntimeFailure, match=reason):
                session.run(outputs, feeds)
        np.testing.assert_array_equal(session.run(["y"], {"x": value})[0], value)


def test_an_output_of_strings_is_refused(tmp_path: Path) -> None:
    node = helper.make_node("Cast", ["x"], ["y"], to=TensorProto.STRING)
    path = save(tmp_path / "model.onnx", [node], [("x", TensorProto.FLOAT, [1])], [("y", TensorProto.STRING, [1])])
    with open_runtime(MIDDLE) as runtime:
        session = runtime.load(path)
        with pytest.raises(RuntimeFailure, match="cannot run model.onnx: got the output y is not a tensor of numbers"):
            session.run(["y"], {"x": np.ones(1, dtype=np.float32)})


def test_a_model_that_crashes_the_runtime_is_named_and_the_next_one_loads(tmp_path: Path) -> None:
    # ONNX Runtime before 1.27 unfolds a function that calls itself until its stack is full.
    call = helper.make_node("again", ["x"], ["y"], domain="local")
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("local", 1)]
    function = helper.make_function("local", "again", ["x"], ["y"], [call], opsets)
    tensors = [(name, TensorProto.FLOAT, [1]) for name in ("x", "y")]
    path = save(tmp_path / "model.onnx", [call], tensors[:1], tensors[1:], functions=[function])
    value = np.ones((1, 2), dtype=np.float32)
    with open_runtime(MIDDLE) as runtime:
        before = runtime.load(save_identity(tmp_path / "before.onnx"))
        with pytest.raises(RuntimeFailure) as caught:
            runtime.load(path)
        assert str(caught.value) == (
            "the ONNX Runtime 1.23.0 of Triton 25.08 cannot load model.onnx: its process died: got SIGSEGV."
        )
        with pytest.raises(
            RuntimeFailure, match=r"cannot run before\.onnx: got a process that has ended; load the file"
        ):
            before.run(["y"], {"x": value})
        before.close()
        after = runtime.load(save_identity(tmp_path / "after.onnx"))
        np.testing.assert_array_equal(after.run(["y"], {"x": value})[0], value)


@pytest.mark.parametrize(
    ("number", "end"),
    [
        (signal.SIGKILL, "SIGKILL; the machine may have run out of memory"),
        (signal.SIGABRT, "SIGABRT"),
    ],
)
def test_a_worker_that_dies_in_the_middle_of_a_run_is_told_with_its_signal(
    tmp_path: Path, number: int, end: str
) -> None:
    with open_runtime(MIDDLE) as runtime:
        session = runtime.load(save_endless(tmp_path / "model.onnx"))
        worker = runtime._worker
        assert worker is not None
        killer = threading.Timer(0.3, os.kill, [worker._process.pid, number])
        killer.start()
        with pytest.raises(RuntimeFailure) as caught:
            session.run(["y"], ENDLESS)
        killer.join()
    assert str(caught.value) == (
        f"the ONNX Runtime 1.23.0 of Triton 25.08 cannot run model.onnx: its process died: got {end}."
    )


SCRIPT = """
import sys
from pathlib import Path
import numpy as np
from export.engines.onnxruntime_process import open_runtime
from export.targets import find_target

with open_runtime(find_target("25.08")) as runtime:
    session = runtime.load(Path(sys.argv[1]))
    print(runtime._worker._process.pid, flush=True)
    session.run(["y"], {"x": np.array(2**62)})
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_worker_outlives_the_process_that_asked_it(tmp_path: Path, number: int) -> None:
    fetch_runtime(MIDDLE)
    command = [sys.executable, "-c", SCRIPT, str(save_endless(tmp_path / "model.onnx"))]
    with subprocess.Popen(command, cwd=CHECKOUT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        time.sleep(0.2)
        parent.send_signal(number)
        parent.wait(timeout=10)
    deadline = time.monotonic() + 10
    while is_running(worker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(worker)


def is_running(pid: int) -> bool:
    """Zombies, which an init that reaps nobody leaves, do not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# A program of its own: a signal that meets the tests' own process a moment too early or too late ends all of them.
INTERRUPTED = """
import sys
from pathlib import Path
import numpy as np
from export.engines.onnxruntime_process import open_runtime
from export.targets import find_target

with open_runtime(find_target("25.08")) as runtime:
    session = runtime.load(Path(sys.argv[1]))
    worker = runtime._worker
    try:
        print("running", flush=True)
        session.run(["y"], {"x": np.array(2**62)})
    except KeyboardInterrupt:
        print("alive" if worker.is_alive or worker._process.poll() is None else "ended", flush=True)
"""


def test_ctrl_c_in_the_middle_of_a_run_ends_the_worker(tmp_path: Path) -> None:
    fetch_runtime(MIDDLE)
    command = [sys.executable, "-c", INTERRUPTED, save_endless(tmp_path / "model.onnx")]
    with subprocess.Popen(command, cwd=CHECKOUT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "running\n"
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == "ended\n"
        assert process.wait(timeout=60) == 0


def test_a_wheel_that_cannot_be_fetched_is_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnxruntime_process, "CACHE", tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    told = []
    with pytest.raises(RuntimeFailure) as caught, open_runtime(MIDDLE, on_progress=told.append) as runtime:
        runtime.load(tmp_path / "model.onnx")
    assert str(caught.value) == (
        "the ONNX Runtime 1.23.0 of Triton 25.08 cannot be fetched: expected pip to install onnxruntime==1.23.0, "
        "got 'No matching distribution found for onnxruntime==1.23.0'; connect to a package index that has it for "
        f"Python {sys.version_info[0]}.{sys.version_info[1]}, or choose another target."
    )
    assert told == ["fetching ONNX Runtime 1.23.0"]
    assert list(tmp_path.iterdir()) == []


def test_a_wheel_is_kept_and_a_cache_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, folder = tmp_path / "file", tmp_path / "folder" / "cache"
    file.touch()
    installed = []

    def install(version: str, target: Path, what: str) -> None:
        installed.append(version)
        target.mkdir()

    monkeypatch.setattr(onnxruntime_process, "_install", install)
    monkeypatch.setattr(onnxruntime_process, "CACHE", folder)
    name = f"onnxruntime-1.23.0-{sys.implementation.cache_tag}"
    assert [fetch_runtime(MIDDLE), fetch_runtime(MIDDLE)] == [folder / name] * 2
    assert installed == ["1.23.0"]
    assert list(folder.iterdir()) == [folder / name]
    monkeypatch.setattr(onnxruntime_process, "CACHE", file / "below")
    with pytest.raises(RuntimeFailure, match=r"expected a folder that can be written, got .*Not a dir"):
        fetch_runtime(MIDDLE)


@needs_newest
def test_a_folder_with_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = fetch_runtime(NEWEST)
    assert other is not None
    folder = tmp_path / other.name.replace("1.27.0", "1.23.0")
    folder.symlink_to(other)
    monkeypatch.setattr(onnxruntime_process, "CACHE", tmp_path)
    with pytest.raises(RuntimeFailure) as caught, open_runtime(MIDDLE) as runtime:
        runtime.load(tmp_path / "model.onnx")
    assert str(caught.value) == (
        f"{folder} is not the ONNX Runtime 1.23.0 of Triton 25.08: expected 1.23.0, got 1.27.0; remove {folder}."
    )


def test_a_damaged_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / f"onnxruntime-1.23.0-{sys.implementation.cache_tag}"
    Path(folder, "onnxruntime").mkdir(parents=True)
    Path(folder, "onnxruntime", "__init__.py").write_text("import onnxruntime.gone\n")
    monkeypatch.setattr(onnxruntime_process, "CACHE", tmp_path)
    with pytest.raises(RuntimeFailure) as caught, open_runtime(MIDDLE) as runtime:
        runtime.load(tmp_path / "model.onnx")
    assert str(caught.value) == (
        f"{folder} is not the ONNX Runtime 1.23.0 of Triton 25.08: expected 1.23.0, "
        f"got ModuleNotFoundError: No module named 'onnxruntime.gone'; remove {folder}."
    )
