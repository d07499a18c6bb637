"""ONNX Runtime: runs the graph as it is, on CPUs and GPUs."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from ..graph.precisions import PRECISIONS
from .engine import Engine, Run, Runner
from .limits import INSTANCES, INTRA_OP_THREADS

if TYPE_CHECKING:
    from tritonclient.grpc import model_config_pb2 as pb

    from ..targets import Target


class OnnxRuntime(Engine):
    """Takes every graph that the target's ONNX Runtime loads, which writing the graph sees to."""

    name = "onnxruntime"
    title = "ONNX Runtime"
    help = "on CPUs and GPUs"
    backend = "onnxruntime"
    model_file = "model.onnx"
    graph_precisions: ClassVar[Mapping[str, str]] = {name: name for name in PRECISIONS}
    builds = False
    has_lean = True
    has_ragged = True
    is_measured = True
    threads_parameter = "intra_op_thread_count"

    def check(self, precision: str, target: "Target") -> None:
        """See `Engine`. Where the target's version is not the installed one, it is fetched now.

        Raises:
            RuntimeFailure: It cannot be fetched.
        """
        from .onnxruntime_process import fetch_runtime

        fetch_runtime(target)

    @contextmanager
    def open(self, path: Path, target: "Target") -> Iterator[Runner]:
        """See `Engine`. In a process of its own, under the target's version."""
        from .onnxruntime_process import open_runtime

        with open_runtime(target) as runtime:
            yield runtime.load(path)

    def open_here(self, path: Path) -> Run:
        """See `Engine`. In the version that is installed."""
        from ..graph.files import open_session

        session = open_session(path)
        return lambda names, feed: session.run(list(names), dict(feed))

    def configure(self, config: "pb.ModelConfig") -> None:
        """See `Engine`."""
        from tritonclient.grpc import model_config_pb2 as pb

        config.instance_group.add(kind=pb.ModelInstanceGroup.KIND_AUTO, count=INSTANCES)
        config.parameters[self.threads_parameter].string_value = str(INTRA_OP_THREADS)
