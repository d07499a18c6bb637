"""OpenVINO: runs the graph on CPUs, in fp32, or faster in bf16 or int8."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from .engine import Engine, Run, Runner, VerifiedGraph
from .limits import INSTANCES

if TYPE_CHECKING:
    from tritonclient.grpc import model_config_pb2 as pb

    from ..targets import Target


class OpenVINO(Engine):
    """Takes the fp32 graph for every precision: bf16 is how it computes, and for int8 it finds scales by itself."""

    name = "openvino"
    title = "OpenVINO"
    help = "on CPUs, faster than ONNX Runtime in bf16 and int8; needs the instructions of the CPU that it was proven on"
    # Not `openvino`: NVIDIA's images have a native backend of that name, which reads other files.
    backend = "python_openvino"
    model_file = "openvino.json"
    graph_precisions: ClassVar[Mapping[str, str]] = {"fp32": "fp32", "bf16": "fp32", "int8": "fp32"}
    has_lean = True
    is_measured = True

    def check(self, precision: str, target: "Target") -> None:
        """See `Engine`."""
        from .openvino_model import choose_arithmetic, find_version

        find_version()
        choose_arithmetic(precision)

    def build(self, graph: VerifiedGraph, directory: Path) -> None:
        """See `Engine`."""
        if graph.precision == "int8":
            from .openvino_int8 import write_quantized

            write_quantized(graph, directory)
        else:
            from .openvino_model import write_graph

            write_graph(graph, directory)

    @contextmanager
    def open(self, path: Path, target: "Target") -> Iterator[Runner]:
        """See `Engine`. In this process, as an instance of the backend runs it."""
        from .openvino_model import OpenVinoRunner

        yield OpenVinoRunner(path)

    def open_here(self, path: Path) -> Run:
        """See `Engine`."""
        from .openvino_model import OpenVinoRunner

        return OpenVinoRunner(path).run

    def configure(self, config: "pb.ModelConfig") -> None:
        """See `Engine`."""
        from tritonclient.grpc import model_config_pb2 as pb

        config.instance_group.add(kind=pb.ModelInstanceGroup.KIND_CPU, count=INSTANCES)
