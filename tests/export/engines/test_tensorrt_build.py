import ast
import hashlib
import inspect
import json
import re
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock, call

import numpy as np
import onnx
import pytest
import torch
from google.protobuf import text_format
from harness import CHECKOUT, Exported, Published
from onnxruntime.quantization import quantize_dynamic
from tritonclient.grpc import model_config_pb2 as pb

from export.engines import tensorrt_build, tensorrt_engine
from export.engines.engine import AxisRange, VerifiedGraph
from export.engines.limits import INSTANCES, MAX_BATCH_SIZE
from export.engines.table import ENGINES, ONNXRUNTIME
from export.engines.tensorrt_build import PlanRunner, build_engine, find_version
from export.engines.tensorrt_plan import (
    ShapeRange,
    build_calibration_batches,
    check_loads,
    check_operators,
    derive_profile,
    parse_version,
    plan_build,
)
from export.errors import EngineError
from export.graph.files import Feed, load_graph
from export.graph.fp16 import write_float16
from export.graph.islands import find_islands
from export.graph.precisions import PRECISIONS
from export.repository.model_config import build_configs, name_models
from export.signature import BATCH, SEQ_LEN, WINDOWS, ModelSignature, TensorSignature
from export.stages import plan_stages
from export.targets import DEFAULT_TARGET, find_target

TENSORRT = ENGINES["tensorrt"]

STUBS = CHECKOUT / ".venv" / "stubs" / "tensorrt_bindings" / "tensorrt.pyi"


def build_signature(*dims: tuple[str | int, ...], max_length: int = 256) -> ModelSignature:
    names = ("input_ids", "attention_mask", "token_type_ids")
    return ModelSignature(
        inputs=tuple(
            TensorSignature(name=name, dtype=torch.int64, dims=item) for name, item in zip(names, dims, strict=False)
        ),
        outputs=(TensorSignature(name="made", dtype=torch.float32, dims=(BATCH, 3)),),
        longest={SEQ_LEN: max_length},
    )


TEXT_SIGNATURE = build_signature((BATCH, SEQ_LEN), (BATCH, SEQ_LEN))
OPTIONS = {"precision": "fp16", "tensorrt_version": "10.5.0", "max_batch_size": 32}


def test_each_instance_gets_a_profile_derived_from_the_signature() -> None:
    plan = plan_build(TEXT_SIGNATURE, instances=2, **OPTIONS)
    shapes = ShapeRange(minimum=(1, 1), optimum=(8, 64), maximum=(32, 256))
    assert plan.profiles == ({"input_ids": shapes, "attention_mask": shapes},) * 2
    assert plan.max_batch_size == 32


def test_shapes_that_are_fixed_need_no_profile_and_others_are_fixed_in_it() -> None:
    fixed = build_signature((4, 3, 224, 224))
    assert plan_build(fixed, instances=2, **OPTIONS).profiles == ()
    image = build_signature((BATCH, 3, 224, 224))
    shapes = ShapeRange(minimum=(1, 3, 224, 224), optimum=(8, 3, 224, 224), maximum=(32, 3, 224, 224))
    assert derive_profile(image, 32) == {"input_ids": shapes}
    windows = build_signature((BATCH, WINDOWS, SEQ_LEN), max_length=48)
    shapes = ShapeRange(minimum=(1, 1, 1), optimum=(8, 1, 48), maximum=(32, 16, 48))
    assert derive_profile(windows, 32) == {"input_ids": shapes}
    assert derive_profile(TEXT_SIGNATURE, 1)["input_ids"].maximum == (1, 256)


def test_an_axis_of_unknown_size_is_asked_for() -> None:
    signature = build_signature((BATCH, "frames", 80))
    with pytest.raises(
        EngineError,
        match=r"^the sizes of the axis frames of the input input_ids are not known: expected one of batch, seq_len, "
        r"windows, got frames; say how small and how large it gets\.$",
    ):
        plan_build(signature, **OPTIONS)
    ranges = {"frames": AxisRange(minimum=10, optimum=100, maximum=3000)}
    assert plan_build(signature, ranges=ranges, **OPTIONS).profiles[0]["input_ids"].optimum == (8, 100, 80)
    with pytest.raises(
        EngineError, match=r"^a range of sizes is empty: expected 0 < minimum <= optimum <= maximum, got 2, "
    ):
        AxisRange(minimum=2, optimum=1, maximum=3)


@pytest.mark.parametrize("version", ["10.0.1", "10.5.0", "10.12.0.36", "11.1.0.106"])
def test_floats_are_strongly_typed_and_take_their_precision_from_the_graph(version: str) -> None:
    options = OPTIONS | {"tensorrt_version": version}
    half, full = (plan_build(TEXT_SIGNATURE, **options | {"precision": name}) for name in ("fp16", "fp32"))
    assert (half.strongly_typed, half.build.set_flags, half.build.cleared_flags) == (True, (), ())
    assert (full.strongly_typed, full.build.set_flags, full.build.cleared_flags) == (True, (), ("TF32",))
    assert [TENSORRT.find_graph_precision(name) for name in ("fp16", "fp32")] == ["fp16", "fp32"]


def test_int8_is_calibrated_as_long_as_tensorrt_can() -> None:
    options = OPTIONS | {"precision": "int8"}
    plan = plan_build(TEXT_SIGNATURE, **options)
    assert (plan.strongly_typed, plan.build.set_flags, plan.build.calibrates) == (False, ("INT8", "FP16"), True)
    assert TENSORRT.find_graph_precision("int8") == "fp32"
    with pytest.raises(
        EngineError,
        match=r"^TensorRT 11\.0\.0\.114 has no calibration for int8: expected a version below 11\.0, got "
        r"11\.0\.0\.114; pass --precision fp16, or export for a Triton with TensorRT 10\.$",
    ):
        plan_build(TEXT_SIGNATURE, **options | {"tensorrt_version": "11.0.0.114"})


def test_what_no_tensorrt_can_build_is_refused() -> None:
    with pytest.raises(
        EngineError, match=r"^this TensorRT has no INT64 inputs: expected TensorRT 10\.0 or newer, got 8\.6\.1; "
    ):
        plan_build(TEXT_SIGNATURE, **OPTIONS | {"tensorrt_version": "8.6.1"})
    with pytest.raises(
        EngineError, match=r"^TensorRT does not serve bf16: expected one of fp16, fp32, int8, got bf16; pass one of"
    ):
        plan_stages(PRECISIONS["bf16"], TENSORRT, is_own_module=False)
    with pytest.raises(
        EngineError, match=r"^a TensorRT version cannot be read: expected numbers, such as 10\.5\.0, got ten\.$"
    ):
        parse_version("ten")
    assert parse_version("10.14.1.48.post1") == (10, 14, 1, 48)


def test_the_real_graph_and_its_fp16_form_have_no_operator_that_tensorrt_lacks(
    published: Published, tmp_path: Path
) -> None:
    graph = published.repository / "sentence_embedding_model" / "1" / "model.onnx"
    check_operators(graph)
    write_float16(graph, tmp_path / "model.onnx", find_islands(load_graph(graph), {}))
    check_operators(tmp_path / "model.onnx")


def test_a_graph_for_another_engine_is_refused_before_it_is_built(exported: Exported, tmp_path: Path) -> None:
    quantized = tmp_path / "model.onnx"
    quantize_dynamic(exported.model_file, quantized, op_types_to_quantize=["MatMul"])
    with pytest.raises(
        EngineError,
        match=r"^model\.onnx has operators that TensorRT cannot build: expected those of the plain exported graph, got "
        r"DynamicQuantizeLinear, MatMulInteger; build the plan from the plain fp32 or fp16 graph; its int8 is ",
    ):
        check_operators(quantized)
    inside = """<ir_version: 10, opset_import: ["": 18, "com.microsoft": 1]>
    main (float[4] x, bool flag) => (float[4] y) {
        y = If(flag) <then_branch = yes () => (float[4] a) { a = com.microsoft.Gelu(x) },
                      else_branch = no () => (float[4] b) { b = Neg(x) }>
    }"""
    onnx.save(onnx.parser.parse_model(inside), quantized)
    with pytest.raises(EngineError, match=r"got com\.microsoft\.Gelu; "):
        check_operators(quantized)


def build_feed(rows: int, seq_len: int, start: int = 1) -> Feed:
    ids = np.arange(start, start + rows * seq_len).reshape(rows, seq_len)
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


def test_calibration_batches_are_of_one_shape_and_hold_every_row() -> None:
    plan = plan_build(TEXT_SIGNATURE, **OPTIONS | {"precision": "int8", "max_batch_size": 12})
    feeds = [build_feed(2, 5), build_feed(1, 9, start=100), build_feed(1, 2, start=200)]
    first, second = build_calibration_batches(feeds, plan)
    assert first["input_ids"].shape == second["input_ids"].shape == (3, 9)
    assert first["input_ids"].dtype == np.int64
    assert first["input_ids"][0].tolist() == [1, 2, 3, 4, 5, 0, 0, 0, 0]
    assert first["attention_mask"][0].tolist() == [1] * 5 + [0] * 4
    assert second["input_ids"][0].tolist() == [200, 201] + [0] * 7
    # Filled up with the first rows.
    np.testing.assert_array_equal(second["input_ids"][1:], first["input_ids"][:2])
    fixed = plan_build(build_signature((2, 4), (2, 4)), **OPTIONS | {"precision": "int8"})
    assert len(build_calibration_batches([build_feed(2, 4)] * 3, fixed)) == 3


def test_calibration_without_text_or_beyond_the_profile_is_refused() -> None:
    plan = plan_build(TEXT_SIGNATURE, **OPTIONS | {"precision": "int8"})
    with pytest.raises(
        EngineError, match=r"^int8 cannot be calibrated without samples: expected real text, got none; "
    ):
        build_calibration_batches([], plan)
    with pytest.raises(
        EngineError,
        match=r"^the samples of input_ids are longer than the optimisation profile admits: expected at most \[256\], "
        r"got \[257\]; ",
    ):
        build_calibration_batches([build_feed(1, 257)], plan)


@pytest.mark.parametrize(
    ("built", "serving", "loads"),
    [
        ("10.5.0", "10.5", True),
        ("10.5.0", "10.5.0.18", True),
        ("10.13.3.9", "10.13.3.9", True),
        ("10.13.0.35", "10.13.3.9", False),
        ("10.5.0", "10.4", False),
        ("10.5.0", "10.13.3.9", False),
        ("10.13.3", "10.5", False),
        ("10.5.0", "11.1.0.106", False),
    ],
)
def test_a_plan_is_for_the_tensorrt_that_built_it(built: str, serving: str, loads: bool) -> None:
    target = replace(DEFAULT_TARGET, tensorrt_version=serving)
    if loads:
        check_loads(built, target)
        return
    with pytest.raises(
        EngineError,
        match=rf"^Triton 24\.10 does not load a plan of this TensorRT: expected TensorRT {re.escape(serving)}, got "
        rf"{re.escape(built)}; build it in the image of Triton 24\.10 \(docker/tensorrt/build\.sh\)\.$",
    ):
        check_loads(built, target)


def test_a_target_whose_tensorrt_is_not_known_gets_no_plan() -> None:
    with pytest.raises(
        EngineError, match=r"^the TensorRT of Triton 24\.10 is not known: .* or --engine onnxruntime\.$"
    ):
        check_loads("10.5.0", replace(DEFAULT_TARGET, tensorrt_version=None))


def test_the_configuration_differs_from_that_of_the_graph_in_what_must_differ_alone() -> None:
    names = name_models("tiny", TEXT_SIGNATURE)

    def build(signature: ModelSignature) -> list[pb.ModelConfig]:
        return [
            build_configs(names, signature, version=1, served=[1], engine=engine)[names.model]
            for engine in (ONNXRUNTIME, TENSORRT)
        ]

    before, after = build(TEXT_SIGNATURE)
    assert (before.backend, before.default_model_filename) == ("onnxruntime", "model.onnx")
    assert (after.backend, after.default_model_filename) == ("tensorrt", "model.plan")
    assert [(group.kind, group.count, list(group.profile)) for group in after.instance_group] == [
        (pb.ModelInstanceGroup.KIND_GPU, 1, ["0"]),
        (pb.ModelInstanceGroup.KIND_GPU, 1, ["1"]),
    ]
    assert {*before.parameters} - {*after.parameters} == {"intra_op_thread_count"}
    assert text_format.Parse(text_format.MessageToString(after), pb.ModelConfig()) == after
    for name in ("backend", "default_model_filename", "instance_group", "parameters"):
        before.ClearField(name)
        after.ClearField(name)
    assert after == before
    assert after.max_batch_size == MAX_BATCH_SIZE and len(after.model_warmup) == 2
    fixed = ModelSignature(
        inputs=(TensorSignature(name="image", dtype=torch.float32, dims=(4, 3)),),
        outputs=(TensorSignature(name="made", dtype=torch.float32, dims=(4,)),),
    )
    assert not build(fixed)[1].instance_group[0].profile, "there is no profile to choose"


def test_without_tensorrt_or_a_gpu_the_one_command_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    remedy = r"run docker/tensorrt/build\.sh, which exports in NVIDIA's image, on a machine with a GPU\.$"
    with pytest.raises(
        EngineError, match=r"^TensorRT is not installed: expected the package tensorrt, got none; " + remedy
    ):
        find_version()
    # The stubs, installed, are an empty package of that name.
    monkeypatch.setitem(sys.modules, "tensorrt", types.ModuleType("tensorrt"))
    with pytest.raises(EngineError, match="^TensorRT is not installed: "):
        PlanRunner(tmp_path / "model.plan")
    monkeypatch.setitem(sys.modules, "tensorrt", MagicMock(__version__="10.5.0"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        EngineError, match=r"^there is no GPU to build a plan for: expected a CUDA device, got none; " + remedy
    ):
        find_version()


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """Stand in for TensorRT: take every call and build a plan of four bytes."""
    module = MagicMock(__version__="10.5.0")
    module.NetworkDefinitionCreationFlag.STRONGLY_TYPED = 1
    module.Dims = tuple
    module.IInt8EntropyCalibrator2 = type("IInt8EntropyCalibrator2", (), {})
    module.Builder.return_value.build_serialized_network.return_value = b"plan"
    config = module.Builder.return_value.create_builder_config.return_value
    config.get_timing_cache.return_value.serialize.return_value = b"timings"
    module.OnnxParser.return_value.parse_from_file.return_value = True
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    return module


def test_the_builder_is_told_what_was_planned(recorder: MagicMock, exported: Exported, tmp_path: Path) -> None:
    plan = plan_build(exported.source.task.signature, instances=2, **OPTIONS | {"precision": "fp32"})
    cache = tmp_path / "cache"
    cache.mkdir()
    metadata = build_engine(plan, exported.model_file, tmp_path, onnx_sha256={"model.onnx": "bb"}, cache=cache)
    builder = recorder.Builder.return_value
    config = builder.create_builder_config.return_value
    builder.create_network.assert_called_once_with(1 << 1)
    recorder.OnnxParser.return_value.parse_from_file.assert_called_once_with(str(exported.model_file))
    config.set_flag.assert_not_called()
    config.clear_flag.assert_called_once_with(recorder.BuilderFlag.TF32)
    profile = builder.create_optimization_profile.return_value
    assert config.add_optimization_profile.call_args_list == [call(profile)] * 2
    assert profile.set_shape.call_args_list[0] == call("input_ids", (1, 1), (8, 64), (32, 64))
    assert {args.args[0] for args in profile.set_shape.call_args_list} == {
        tensor.name for tensor in exported.source.task.signature.inputs
    }
    assert not config.set_calibration_profile.called
    config.create_timing_cache.assert_called_once_with(b"")
    assert (tmp_path / "model.plan").read_bytes() == b"plan"
    assert (cache / "10.5.0-9.0.timings").read_bytes() == b"timings"
    assert json.loads((tmp_path / "model.plan.json").read_text()) == metadata.to_json()
    assert (metadata.compute_capability, metadata.device, metadata.strongly_typed) == ("9.0", "a GPU", True)
    assert metadata.plan_sha256 == hashlib.sha256(b"plan").hexdigest()
    build_engine(plan, exported.model_file, tmp_path, onnx_sha256={}, cache=cache)
    assert config.create_timing_cache.call_args == call(b"timings")


def test_the_calibrator_hands_over_every_batch_and_keeps_what_came_of_it(
    recorder: MagicMock, exported: Exported, tmp_path: Path
) -> None:
    plan = plan_build(exported.source.task.signature, **OPTIONS | {"precision": "int8"})
    feeds = [
        {tensor.name: np.full((5, length), length) for tensor in exported.source.task.signature.inputs}
        for length in (3, 7)
    ]
    build_engine(plan, exported.model_file, tmp_path, onnx_sha256={}, feeds=feeds, cache=tmp_path)
    config = recorder.Builder.return_value.create_builder_config.return_value
    recorder.Builder.return_value.create_network.assert_called_once_with(0)
    assert config.set_flag.call_args_list == [call(recorder.BuilderFlag.INT8), call(recorder.BuilderFlag.FP16)]
    config.set_calibration_profile.assert_called_once()
    calibrator = config.int8_calibrator
    names = [tensor.name for tensor in exported.source.task.signature.inputs]
    assert calibrator.get_batch_size() == 8
    for _ in range(2):
        addresses = calibrator.get_batch(names)
        assert [tensor.shape for tensor in calibrator.held] == [(8, 7)] * len(names)
        assert addresses == [tensor.data_ptr() for tensor in calibrator.held]
    assert calibrator.get_batch(names) == []
    assert calibrator.read_calibration_cache() is None
    calibrator.write_calibration_cache(b"scales")
    assert calibrator.read_calibration_cache() == b"scales"
    other = [{name: values + 1 for name, values in feed.items()} for feed in feeds]
    build_engine(plan, exported.model_file, tmp_path, onnx_sha256={}, feeds=other, cache=tmp_path)
    assert config.int8_calibrator.read_calibration_cache() is None, "scales of other text are not taken"


def test_the_engine_refuses_what_the_target_would_not_load_before_anything_is_read(recorder: MagicMock) -> None:
    TENSORRT.check("int8", DEFAULT_TARGET)
    with pytest.raises(
        EngineError, match=r"^Triton 25\.09 does not load a plan of this TensorRT: expected TensorRT 10"
    ):
        TENSORRT.check("fp32", find_target("25.09"))
    recorder.__version__ = "11.1.0"
    with pytest.raises(EngineError, match=r"^TensorRT 11\.1\.0 has no calibration for int8: "):
        TENSORRT.check("int8", find_target("26.07"))


def test_the_engine_builds_for_every_instance_and_the_largest_batch(
    recorder: MagicMock, exported: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorrt_engine, "CACHE", tmp_path / "cache")
    directory = tmp_path / "plan"
    directory.mkdir()
    graph = VerifiedGraph(
        path=exported.model_file,
        signature=exported.source.task.signature,
        precision="fp32",
        target=DEFAULT_TARGET,
        sha256={"model.onnx": "bb"},
    )
    TENSORRT.build(graph, directory)
    assert sorted(path.name for path in directory.iterdir()) == [TENSORRT.model_file, "model.plan.json"]
    metadata = json.loads((directory / "model.plan.json").read_text())
    assert (len(metadata["profiles"]), metadata["max_batch_size"]) == (INSTANCES, MAX_BATCH_SIZE)
    assert metadata["onnx_sha256"] == {"model.onnx": "bb"}
    assert (tmp_path / "cache" / "tensorrt" / "10.5.0-9.0.timings").is_file()


def test_a_graph_that_fails_to_parse_or_build_is_refused(
    recorder: MagicMock, exported: Exported, tmp_path: Path
) -> None:
    plan = plan_build(exported.source.task.signature, **OPTIONS)
    builder, parser = recorder.Builder.return_value, recorder.OnnxParser.return_value
    builder.build_serialized_network.return_value = None
    with pytest.raises(
        EngineError, match=r"^TensorRT 10\.5\.0 cannot build model\.onnx: expected a plan, got an error, in "
    ):
        build_engine(plan, exported.model_file, tmp_path, onnx_sha256={})
    parser.parse_from_file.return_value = False
    parser.num_errors = 1
    parser.get_error.return_value.desc.return_value = "No importer registered for op: Foo."
    with pytest.raises(
        EngineError, match=r"cannot read model\.onnx: expected .*, got No importer registered for op: Foo; "
    ):
        build_engine(plan, exported.model_file, tmp_path, onnx_sha256={})
    recorder.Runtime.return_value.deserialize_cuda_engine.return_value = None
    (tmp_path / "model.plan").write_bytes(b"other")
    with pytest.raises(EngineError, match=r"^TensorRT 10\.5\.0 does not load model\.plan: "):
        PlanRunner(tmp_path / "model.plan")


@pytest.mark.skipif(not STUBS.is_file(), reason="tensorrt-stubs is not there; `make setup` fetches it")
def test_the_types_that_mypy_checks_with_are_those_of_the_published_stubs() -> None:
    published: dict[str, str] = {}
    current = ""
    for line in STUBS.read_text().splitlines():
        if found := re.match(r"class (\w+)", line):
            current = found[1]
        published[current] = published.get(current, "") + line + "\n"
    tree = ast.parse((CHECKOUT / "typings" / "tensorrt.pyi").read_text())
    for item in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        assert item.name in published, item.name
        for member in item.body:
            text = published[item.name]
            if isinstance(member, ast.AnnAssign):
                name = ast.unparse(member.target)
                assert re.search(rf"^    ({name}: |def {name}\(self\) -> )", text, re.MULTILINE), f"{item.name}.{name}"
            elif isinstance(member, ast.FunctionDef) and member.name not in ("__iter__", "__int__"):
                arguments = [argument.arg for argument in member.args.args]
                known = [
                    re.findall(r"(?:^|, )(\w+)(?=[:,=]|$)", found)
                    for found in re.findall(rf"    def {member.name}\((.*)\)(?: ->.*)?:", text)
                ]
                # An optional parameter that is not passed may be missing.
                assert any(arguments == names[: len(arguments)] for names in known), f"{item.name}.{member.name}"
    flags = "\n".join(published[name] for name in ("BuilderFlag", "NetworkDefinitionCreationFlag", "TensorIOMode"))
    for name in ("INT8", "FP16", "TF32", "STRONGLY_TYPED", "INPUT"):
        assert f"    {name}: typing.ClassVar" in flags


def test_every_call_goes_through_what_the_types_describe() -> None:
    described = (CHECKOUT / "typings" / "tensorrt.pyi").read_text()
    for name in re.findall(r"\btrt\.(\w+)", inspect.getsource(tensorrt_build)):
        assert re.search(rf"(class|def) {name}\b|^{name}:", described, re.MULTILINE), name


def test_the_one_command_is_a_shell_script_whose_image_can_be_built_from_the_checkout(tmp_path: Path) -> None:
    folder = CHECKOUT / "docker" / "tensorrt"
    recipe = (folder / "Dockerfile").read_text()
    for source in re.findall(r"^COPY (?!--from=)(.+) \S+$", recipe, re.MULTILINE):
        assert all((CHECKOUT / path).exists() for path in source.split()), source
    assert "FROM nvcr.io/nvidia/tritonserver:${RELEASE}-py3" in recipe
    command = [str(folder / "build.sh"), str(tmp_path), str(tmp_path / "models")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert re.match(r"usage: \S+build\.sh CHECKPOINT REPOSITORY --name NAME ", done.stderr)
    done = subprocess.run(
        [*command, "--name", "x"], env={"PATH": "/nowhere"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert re.match(r"error: \S+ is not here: expected Docker with NVIDIA's toolkit and a GPU, got none; ", done.stderr)
    assert not (tmp_path / "models").exists()
