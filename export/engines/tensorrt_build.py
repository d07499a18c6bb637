"""The builder itself: runs where TensorRT and a GPU are, and nowhere else.

Everything that can be decided without them is in `tensorrt_plan.py`. This file is checked against the types of
TensorRT 10.13 (`tensorrt-stubs`) and, call by call, by a test with a recorder in TensorRT's place; it has been run by
8.5.3 alone, see docs/tensorrt.md.
"""

import hashlib
import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from ..errors import EngineError
from ..graph.files import Feed, find_files
from .tensorrt_plan import (
    PLAN_FILE,
    BuildPlan,
    PlanMetadata,
    Profile,
    ShapeRange,
    build_calibration_batches,
    check_operators,
    describe_profiles,
)

if TYPE_CHECKING:
    import tensorrt as trt

REMEDY = "run docker/tensorrt/build.sh, which exports in NVIDIA's image, on a machine with a GPU"


def find_version() -> str:
    """Return the version of the TensorRT at hand.

    Its Python package may be there as `tensorrt`, or as `tensorrt_bindings` alone beside the libraries of an image.

    Raises:
        EngineError: There is none, or no GPU.
    """
    for name in ("tensorrt", "tensorrt_bindings"):
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        # The stubs alone are an empty package of the same name.
        if hasattr(module, "Builder"):
            sys.modules["tensorrt"] = module
            break
    else:
        raise EngineError("TensorRT is not installed", expected="the package tensorrt", got="none", remedy=REMEDY)
    if not torch.cuda.is_available():
        raise EngineError("there is no GPU to build a plan for", expected="a CUDA device", got="none", remedy=REMEDY)
    return str(module.__version__)


def build_engine(
    plan: BuildPlan,
    graph: Path,
    destination: Path,
    *,
    onnx_sha256: Mapping[str, str],
    feeds: Sequence[Feed] = (),
    cache: Path | None = None,
) -> PlanMetadata:
    """Build `model.plan` and `model.plan.json` in the folder `destination`.

    Args:
        plan: What `plan_build` returned for the version that `find_version` returned.
        graph: The ONNX file to build from; its weights may lie in other files beside it.
        destination: An existing folder.
        onnx_sha256: File name → hash of the verified fp32 graph.
        feeds: Real text, for calibration; each within the profile.
        cache: Folder that keeps timings and calibration from one build to the next; None keeps nothing.

    Raises:
        EngineError: The graph has operators that TensorRT does not know, or it fails to build.
    """
    check_operators(graph)
    find_version()
    import tensorrt as trt

    logger = trt.Logger(trt.Logger.WARNING)
    builder = trt.Builder(logger)
    flags = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED) if plan.strongly_typed else 0
    network = builder.create_network(flags)
    _parse(network, logger, graph)
    config = builder.create_builder_config()
    for name in plan.build.set_flags:
        config.set_flag(getattr(trt.BuilderFlag, name))
    for name in plan.build.cleared_flags:
        config.clear_flag(getattr(trt.BuilderFlag, name))
    for profile in plan.profiles:
        config.add_optimization_profile(_build_profile(builder, profile))
    timings = None if cache is None else cache / f"{trt.__version__}-{_find_capability()}.timings"
    known_timings = timings.read_bytes() if timings is not None and timings.is_file() else b""
    config.set_timing_cache(config.create_timing_cache(known_timings), ignore_mismatch=False)
    if plan.build.calibrates:
        batches = build_calibration_batches(feeds, plan)
        shapes = {name: ShapeRange.fixed(values.shape) for name, values in batches[0].items()}
        if plan.profiles:
            config.set_calibration_profile(_build_profile(builder, shapes))
        # Held here until the plan is built: TensorRT keeps no reference of its own.
        calibrator = _build_calibrator(
            batches, None if cache is None else cache / f"{_key(graph, batches)}.calibration"
        )
        config.int8_calibrator = calibrator
    serialized = builder.build_serialized_network(network, config)
    if serialized is None:
        raise EngineError(
            f"TensorRT {trt.__version__} cannot build {graph.name}",
            expected="a plan",
            got="an error, in its own lines above",
            remedy="export with --engine onnxruntime",
        )
    content = bytes(memoryview(serialized))
    (destination / PLAN_FILE).write_bytes(content)
    if timings is not None:
        timings.write_bytes(bytes(memoryview(config.get_timing_cache().serialize())))
    metadata = PlanMetadata(
        tensorrt_version=str(trt.__version__),
        compute_capability=_find_capability(),
        device=torch.cuda.get_device_name(),
        precision=plan.precision,
        strongly_typed=plan.strongly_typed,
        max_batch_size=plan.max_batch_size,
        profiles=describe_profiles(plan.profiles),
        plan_sha256=hashlib.sha256(content).hexdigest(),
        onnx_sha256=dict(onnx_sha256),
    )
    text = json.dumps(metadata.to_json(), indent=2, sort_keys=True) + "\n"
    (destination / f"{PLAN_FILE}.json").write_text(text, encoding="utf-8")
    return metadata


def _find_capability() -> str:
    major, minor = torch.cuda.get_device_capability()
    return f"{major}.{minor}"


def _parse(network: "trt.INetworkDefinition", logger: "trt.ILogger", graph: Path) -> None:
    import tensorrt as trt

    parser = trt.OnnxParser(network, logger)
    # From the file, not from its bytes: weights in other files lie beside it.
    if not parser.parse_from_file(str(graph)):
        errors = [str(parser.get_error(index).desc()) for index in range(parser.num_errors)]
        raise EngineError(
            f"TensorRT {trt.__version__} cannot read {graph.name}",
            expected="operators that its ONNX parser knows",
            got="; ".join(errors[:3]).rstrip(".") or "an error, in its own lines above",
            remedy="export with --engine onnxruntime",
        )


def _build_profile(builder: "trt.Builder", profile: Profile) -> "trt.IOptimizationProfile":
    import tensorrt as trt

    built = builder.create_optimization_profile()
    for name, shapes in profile.items():
        built.set_shape(name, *(trt.Dims(list(shape)) for shape in (shapes.minimum, shapes.optimum, shapes.maximum)))
    return built


def _build_calibrator(batches: Sequence[Feed], store: Path | None) -> "trt.IInt8EntropyCalibrator2":
    import tensorrt as trt

    class Calibrator(trt.IInt8EntropyCalibrator2):
        """Hands over one batch after another, on the GPU."""

        def __init__(self) -> None:
            super().__init__()
            self.waiting = list(batches)
            self.held: list[torch.Tensor] = []

        def get_batch_size(self) -> int:
            return int(next(iter(batches[0].values())).shape[0])

        def get_batch(self, names: list[str]) -> list[int]:
            if not self.waiting:
                return []
            batch = self.waiting.pop(0)
            # Held until the next one is asked for: only the addresses are handed over.
            self.held = [torch.from_numpy(batch[name]).cuda() for name in names]
            return [tensor.data_ptr() for tensor in self.held]

        def read_calibration_cache(self) -> bytes | None:
            return store.read_bytes() if store is not None and store.is_file() else None

        def write_calibration_cache(self, cache: Any) -> None:
            if store is not None:
                store.write_bytes(bytes(memoryview(cache)))

    return Calibrator()


def _key(graph: Path, batches: Sequence[Feed]) -> str:
    """Return a name for what is calibrated, on what: scales of another graph or other text would be taken silently."""
    digest = hashlib.sha256()
    for file in find_files(graph):
        with file.open("rb") as content:
            while chunk := content.read(1 << 20):
                digest.update(chunk)
    for batch in batches:
        for name, values in sorted(batch.items()):
            digest.update(f"{name}{values.shape}".encode())
            digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()[:16]


class PlanRunner:
    """A plan on the GPU, for the verification: the same questions as ONNX Runtime is asked.

    Args:
        path: The `model.plan`.
        profile: Number of the optimisation profile.

    Raises:
        EngineError: This TensorRT does not load it.
    """

    def __init__(self, path: Path, profile: int = 0) -> None:
        self.versions = {"tensorrt": find_version()}
        self.peak_bytes = 0
        import tensorrt as trt

        self.logger = trt.Logger(trt.Logger.WARNING)
        self.runtime = trt.Runtime(self.logger)
        # It is the file that was built a moment ago.
        self.runtime.engine_host_code_allowed = True
        engine = self.runtime.deserialize_cuda_engine(path.read_bytes())
        if engine is None:
            raise EngineError(
                f"TensorRT {trt.__version__} does not load {path.name}",
                expected="a plan that it built",
                got="an error, in its own lines above",
                remedy="build the plan again",
            )
        self.engine = engine
        self.context = engine.create_execution_context()
        self.stream = torch.cuda.Stream()
        if engine.num_optimization_profiles > 1:
            self.context.set_optimization_profile_async(profile, self.stream.cuda_stream)
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        self.inputs = [name for name in names if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT]
        self.outputs = [name for name in names if name not in self.inputs]

    def run(self, output_names: Sequence[str], feed: Feed) -> list[npt.NDArray[Any]]:
        """Return the outputs that are asked for, in that order.

        Raises:
            EngineError: A shape is outside the profile, or the GPU fails.
        """
        import tensorrt as trt

        given = {name: torch.from_numpy(np.ascontiguousarray(feed[name])).cuda() for name in self.inputs}
        for name, tensor in given.items():
            if not self.context.set_input_shape(name, list(tensor.shape)):
                raise EngineError(
                    f"{PLAN_FILE} takes no input {name} of this shape",
                    expected="one within its optimisation profile",
                    got=str(list(tensor.shape)),
                    remedy="ask for smaller batches or texts",
                )
        made = {}
        for name in self.outputs:
            dtype = torch.from_numpy(np.empty(0, dtype=trt.nptype(self.engine.get_tensor_dtype(name)))).dtype
            made[name] = torch.empty(tuple(self.context.get_tensor_shape(name)), dtype=dtype, device="cuda")
        for name, tensor in (given | made).items():
            self.context.set_tensor_address(name, tensor.data_ptr())
        # The copies above are on the default stream.
        torch.cuda.current_stream().synchronize()
        done = self.context.execute_async_v3(self.stream.cuda_stream)
        self.stream.synchronize()
        if not done:
            raise EngineError(
                f"TensorRT fails to run {PLAN_FILE}",
                expected="an answer",
                got="an error, in its own lines above",
                remedy="export with --engine onnxruntime",
            )
        return [made[name].cpu().numpy() for name in output_names]
