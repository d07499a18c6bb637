"""What every engine can do: one class each, in a file of its own. Imports nothing heavy."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from ..errors import EngineError, list_some

if TYPE_CHECKING:
    from tritonclient.grpc import model_config_pb2 as pb

    from ..graph.conversion import Measure
    from ..graph.files import Feed
    from ..signature import ModelSignature
    from ..targets import Target


class Runner(Protocol):
    """A file that an engine has loaded, for the proof."""

    @property
    def versions(self) -> Mapping[str, str]:
        """Name of the engine → its version."""

    @property
    def peak_bytes(self) -> int:
        """The most memory that a process of its own has held so far; 0 where it has none."""

    def run(self, output_names: Sequence[str], feeds: "Feed") -> "list[Any]":
        """Return the outputs that are asked for, in that order, each an array of the caller's own.

        Raises:
            RuntimeFailure: The engine refuses the inputs or fails on them, in a process of its own.
            EngineError: The same in this process.
        """


# Names of outputs and inputs to those outputs, in that order.
Run = Callable[[Sequence[str], "Feed"], "list[Any]"]


@dataclass(frozen=True, kw_only=True)
class AxisRange:
    """The sizes of a symbolic axis.

    Attributes:
        minimum: The smallest that is served.
        optimum: The one to be fastest at.
        maximum: The largest that is served; an engine may reserve memory for it.
    """

    minimum: int
    optimum: int
    maximum: int

    def __post_init__(self) -> None:
        if not 0 < self.minimum <= self.optimum <= self.maximum:
            raise EngineError(
                "a range of sizes is empty",
                expected="0 < minimum <= optimum <= maximum",
                got=f"{self.minimum}, {self.optimum}, {self.maximum}",
                remedy="pass them in this order",
            )


@dataclass(frozen=True, kw_only=True)
class VerifiedGraph:
    """What an engine builds its own file from.

    Attributes:
        path: ONNX file in the precision that the engine asks for; its weights may lie in other files beside it.
        signature: Inputs and outputs of the graph.
        precision: Name of the precision that was asked for.
        target: Triton release that is to serve it.
        sizes: Symbol → sizes of its axis, where they are known beyond the signature.
        feeds: Real inputs in batches, for engines that measure scales or times.
        sha256: File name → hash of the verified fp32 graph that all this came from.
        measure: Says how good a candidate for `model_file` is, for engines that try several.
        bounds: Metric of quality → what the candidate must hold.
        on_step: Called with what is being done.
        padding: Input name → what stands in its padding, 0 where it is not named.
    """

    path: Path
    signature: "ModelSignature"
    precision: str
    target: "Target"
    sizes: Mapping[str, AxisRange] = field(default_factory=dict)
    feeds: "Sequence[Feed]" = ()
    sha256: Mapping[str, str] = field(default_factory=dict)
    measure: "Measure | None" = None
    bounds: Mapping[str, float] = field(default_factory=dict)
    on_step: Callable[[str], None] = lambda step: None
    padding: Mapping[str, int] = field(default_factory=dict)


# What a task hands to an engine.
Form = Literal["graph", "decoder"]


class Engine(ABC):
    """What runs a published graph, and everything that depends on which one that is.

    Attributes:
        name: What `--engine` takes, and what reports and locks record.
        title: Name in messages and summaries.
        help: What it is good for, for `--help`.
        backend: Name of Triton's backend that runs it.
        model_file: The file that the backend loads.
        graph_precisions: Precision that may be asked for → precision of the graph that it takes for that.
        builds: Whether `model_file` is built from the graph; otherwise it is the graph.
        has_lean: Whether `backends/python_lean` runs it too, in the process that tokenises.
        has_ragged: Whether its backend runs rows of different lengths together, given a graph that takes them so.
        is_measured: Whether `--engine auto` measures it beside others, with `open_here`.
        idle_options: Names of the serving options that have no effect on what it runs.
        threads_parameter: Parameter of the backend that says how many threads a copy has; empty where none does.
        parameter_options: Names of the serving options that are parameters of the backend, by the same names.
        elsewhere: Command that serves the model NAME, where `modelyard serve` does not.
        takes: What it is given: an ONNX graph, or a decoder, a language model whose keys and values it keeps itself.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    help: ClassVar[str]
    backend: ClassVar[str]
    model_file: ClassVar[str]
    graph_precisions: ClassVar[Mapping[str, str]]
    builds: ClassVar[bool] = True
    has_lean: ClassVar[bool] = False
    has_ragged: ClassVar[bool] = False
    is_measured: ClassVar[bool] = False
    idle_options: ClassVar[frozenset[str]] = frozenset()
    threads_parameter: ClassVar[str] = ""
    parameter_options: ClassVar[frozenset[str]] = frozenset()
    elsewhere: ClassVar[str] = ""
    takes: ClassVar[Form] = "graph"

    def find_graph_precision(self, precision: str) -> str:
        """Return the precision of the graph that it takes where `precision` is asked for.

        Raises:
            EngineError: It cannot serve that precision.
        """
        if precision not in self.graph_precisions:
            raise EngineError(
                f"{self.title} does not serve {precision}",
                expected=f"one of {list_some(self.graph_precisions)}",
                got=precision,
                remedy="pass one of these as --precision",
            )
        return self.graph_precisions[precision]

    def check_names(self, precision: str, target: "Target") -> None:
        """Refuse what the names of the precision and of the release tell alone; loads nothing, so it is told at once.

        Raises:
            EngineError: It cannot serve them.
        """
        self.find_graph_precision(precision)

    @abstractmethod
    def check(self, precision: str, target: "Target") -> None:
        """Refuse, before anything is read, what cannot be built here or would not be loaded there.

        Raises:
            EngineError: It cannot; the reason is the message.
        """

    def check_parameters(  # noqa: B027 - most engines have nothing to refuse
        self, parameters: Mapping[str, int | None], cache_shapes: Sequence[tuple[int, int]], precision: str
    ) -> None:
        """Refuse what was asked of the backend where it could not load this model with that.

        Args:
            parameters: Name in `parameter_options` → what was asked for, None where nothing was.
            cache_shapes: The heads of each layer's keys and values, and the size of one.
            precision: Name of the precision.

        Raises:
            EngineError: It could not.
        """

    def build(self, graph: VerifiedGraph, directory: Path) -> None:
        """Write `model_file`, and whatever belongs to it, into the empty folder `directory`.

        Raises:
            EngineError: It fails, or what it built is not for the target.
        """
        raise AssertionError(f"Bug: {self.title} runs the graph itself")

    @abstractmethod
    def open(self, path: Path, target: "Target") -> AbstractContextManager[Runner]:
        """Return the file at `path`, loaded as the target's server would run it, for the length of a `with` statement.

        Raises:
            RuntimeFailure: The target's engine cannot be fetched, or cannot load the file.
            EngineError: The same of an engine in this process.
        """

    def open_here(self, path: Path) -> Run:
        """Return the file at `path`, proven already, loaded in this process on one thread, so that it can be timed.

        Raises:
            ExportError: The engine in this process cannot load it.
        """
        raise AssertionError(f"Bug: {self.title} is not measured")

    def list_version_files(self, name: str, version: int, *, precision: str, context: int) -> Mapping[str, str]:
        """Return the files that name a version's own place, and so are written once its number is known: name → text.

        Args:
            name: The Triton model.
            version: Its version.
            precision: Name of the precision.
            context: How many tokens prompt and answer may have together, 0 where the task has no such limit.
        """
        return {}

    @abstractmethod
    def configure(self, config: "pb.ModelConfig") -> None:
        """Write into a model's configuration, which has everything else, what this engine alone needs.

        Args:
            config: The configuration, changed in place; it has inputs, outputs, batching and warm-up, but not yet
            instances and parameters.
        """
