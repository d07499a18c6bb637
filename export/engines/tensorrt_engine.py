"""TensorRT: a plan for the GPU at hand, built from the verified graph."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from ..locations import CACHE
from .engine import Engine, Runner, VerifiedGraph
from .limits import INSTANCES, MAX_BATCH_SIZE

if TYPE_CHECKING:
    from tritonclient.grpc import model_config_pb2 as pb

    from ..targets import Target


class TensorRT(Engine):
    """Builds where TensorRT and a GPU are. For int8 it finds scales by itself, on the fp32 graph."""

    name = "tensorrt"
    title = "TensorRT"
    help = "a plan for the GPU at hand; runs in NVIDIA's image, see docker/tensorrt/build.sh"
    backend = "tensorrt"
    model_file = "model.plan"
    # A plan has as many profiles as instances were built for.
    idle_options = frozenset({"instances"})
    graph_precisions: ClassVar[Mapping[str, str]] = {"fp32": "fp32", "fp16": "fp16", "int8": "fp32"}

    def check(self, precision: str, target: "Target") -> None:
        """See `Engine`."""
        from .tensorrt_build import find_version
        from .tensorrt_plan import check_builds, check_loads

        version = find_version()
        check_builds(precision, version)
        check_loads(version, target)

    def build(self, graph: VerifiedGraph, directory: Path) -> None:
        """See `Engine`. Timings and calibration are kept: a second build of the same need not measure them again."""
        from .tensorrt_build import build_engine, find_version
        from .tensorrt_plan import plan_build

        plan = plan_build(
            graph.signature,
            precision=graph.precision,
            tensorrt_version=find_version(),
            max_batch_size=MAX_BATCH_SIZE,
            instances=INSTANCES,
            ranges=graph.sizes,
        )
        cache = CACHE / self.name
        cache.mkdir(parents=True, exist_ok=True)
        build_engine(plan, graph.path, directory, onnx_sha256=graph.sha256, feeds=graph.feeds, cache=cache)

    @contextmanager
    def open(self, path: Path, target: "Target") -> Iterator[Runner]:
        """See `Engine`. In this process, by the TensorRT at hand, which `check` has compared with the target's."""
        from .tensorrt_build import PlanRunner

        yield PlanRunner(path)

    def configure(self, config: "pb.ModelConfig") -> None:
        """See `Engine`. Each instance has the optimisation profile of its own number, where the plan has any."""
        from tritonclient.grpc import model_config_pb2 as pb

        has_profiles = config.max_batch_size > 0 or any(-1 in tensor.dims for tensor in config.input)
        for index in range(INSTANCES):
            group = config.instance_group.add(kind=pb.ModelInstanceGroup.KIND_GPU, count=1)
            if has_profiles:
                group.profile.append(str(index))
