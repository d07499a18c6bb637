"""Who is measured: tables of ours, of peers, and of what an engine can do without a server."""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import CHECKOUT

from demo.serving import NAME

PEERS_FOLDER = CHECKOUT / "tests" / "benches" / "peers"
CORES = os.cpu_count() or 1


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """How one text is asked for, and where its vector stands in the answer."""

    path: str
    body: Callable[[str], Any]
    vector: Callable[[Any], Sequence[float]]


def _kserve(model: str) -> Protocol:
    return Protocol(
        path=f"/v2/models/{model}/infer",
        body=lambda text: {"inputs": [{"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "data": [text]}]},
        vector=lambda answer: answer["outputs"][0]["data"],
    )


OURS_PROTOCOL = _kserve(NAME)
KSERVE = _kserve("embed")
PLAIN = Protocol(path="/embed", body=lambda text: {"text": text}, vector=lambda answer: answer["embedding"])
LISTS = Protocol(path="/embed", body=lambda text: {"texts": [text]}, vector=lambda answer: answer[0])
OPENAI = Protocol(
    path="/embeddings",
    body=lambda text: {"model": "embed", "input": [text]},
    vector=lambda answer: answer["data"][0]["embedding"],
)


@dataclass(frozen=True, kw_only=True)
class Ours:
    """A model that modelyard exports and serves.

    Attributes:
        name: For `--ours`.
        title: For tables.
        options: Of `export run`.
        model: Triton's model whose executions count as batches.
        limit: Name of the offline limit that it is held against.
        lengths: What its texts are padded to; none is padded where it is empty.
        is_quick: Whether it is part of `--quick`.
    """

    name: str
    title: str
    options: tuple[str, ...]
    model: str
    limit: str
    lengths: tuple[int, ...] = ()
    is_quick: bool = False

    @property
    def repository(self) -> Path:
        return CHECKOUT / ".cache" / "bench" / "models" / self.name


def _ours(
    engine: str,
    precision: str,
    steps: str,
    *,
    lengths: tuple[int, ...] = (),
    prefetch: bool = False,
    is_quick: bool = False,
) -> Ours:
    titles = {"onnxruntime": "ONNX Runtime", "openvino": "OpenVINO"}
    padded = f"padded to {', '.join(map(str, lengths))}" if lengths else steps
    return Ours(
        name=f"{engine}-{precision}-{'padded-' + str(len(lengths)) if lengths else steps}{'-prefetch' * prefetch}",
        title=f"{titles[engine]} {precision}, {padded}{', prefetch' * prefetch}",
        options=(
            *("--engine", engine, "--precision", precision, "--steps", steps),
            *(["--lengths", *map(str, lengths)] if lengths else []),
            *(["--prefetch"] if prefetch else []),
        ),
        lengths=lengths,
        model=NAME if steps == "lean" else f"{NAME}_model",
        limit=f"{engine}-{precision}",
        is_quick=is_quick,
    )


OURS = {
    ours.name: ours
    for ours in (
        _ours("onnxruntime", "fp32", "ensemble", is_quick=True),
        _ours("onnxruntime", "fp32", "lean", is_quick=True),
        _ours("onnxruntime", "fp32", "ensemble", lengths=(32, 64, 128, 256)),
        # As a naive ensemble has it: everything is padded to the most that the model reads.
        _ours("onnxruntime", "fp32", "ensemble", lengths=(256,)),
        _ours("onnxruntime", "int8", "lean"),
        _ours("openvino", "fp32", "ensemble"),
        _ours("openvino", "fp32", "lean", is_quick=True),
        _ours("openvino", "bf16", "ensemble"),
        _ours("openvino", "bf16", "lean"),
        _ours("openvino", "int8", "lean"),
        _ours("onnxruntime", "fp32", "lean", prefetch=True),
        _ours("openvino", "bf16", "lean", prefetch=True),
        _ours("openvino", "int8", "lean", prefetch=True),
    )
}

# Where the graph and the tokenizer of the peers, and of the reference, come from.
REFERENCE = OURS["onnxruntime-fp32-lean"]


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Another server for the same graph, in an environment of its own.

    Attributes:
        name: For `--peers`.
        title: For tables.
        packages: `peers/NAME.txt` holds what its environment is made of.
        command: What starts it: the first word is a program of that environment, `{...}` a value of `Started`.
        protocol: How it is asked.
        environment: Variables that it is started with.
        has_torch: Whether torch is installed beside.
        is_quick: Whether it is part of `--quick`.
    """

    name: str
    title: str
    packages: str
    command: tuple[str, ...]
    protocol: Protocol = PLAIN
    environment: Mapping[str, str] = field(default_factory=dict)
    has_torch: bool = False
    is_quick: bool = False

    @property
    def folder(self) -> Path:
        return CHECKOUT / ".cache" / "bench" / self.packages


_UVICORN = ("uvicorn", "fastapi_app:app", "--host", "127.0.0.1", "--port", "{port}", "--log-level", "warning")
_INFINITY = ("infinity_emb", "v2", "--model-id", "{checkpoint}", "--served-model-name", "embed")
_INFINITY += ("--host", "127.0.0.1", "--port", "{port}", "--device", "cpu", "--no-bettertransformer")
_INFINITY += ("--log-level", "warning")

PEERS = {
    peer.name: peer
    for peer in (
        Peer(name="fastapi", title="FastAPI + ONNX Runtime", packages="fastapi", command=_UVICORN, is_quick=True),
        Peer(
            name="fastapi-workers",
            title=f"FastAPI + ONNX Runtime, {CORES} workers",
            packages="fastapi",
            command=(*_UVICORN, "--workers", str(CORES)),
            environment={"BENCH_THREADS": "1"},
        ),
        Peer(
            name="litserve",
            title="LitServe, batches of 8",
            packages="litserve",
            command=("python", "litserve_server.py"),
            is_quick=True,
        ),
        Peer(
            name="infinity",
            title="infinity, torch",
            packages="infinity",
            command=(*_INFINITY, "--engine", "torch"),
            protocol=OPENAI,
            has_torch=True,
        ),
        Peer(
            name="mlserver",
            title="MLServer, adaptive batching",
            packages="mlserver",
            command=("python", "mlserver_runtime.py"),
            protocol=KSERVE,
        ),
        Peer(
            name="bentoml",
            title="BentoML, batchable",
            packages="bentoml",
            command=("bentoml", "serve", "bentoml_service:Embedding", "--host", "127.0.0.1", "--port", "{port}"),
            protocol=LISTS,
        ),
        Peer(
            name="ray",
            title="Ray Serve, serve.batch",
            packages="ray",
            command=("python", "ray_deployment.py"),
        ),
        Peer(
            name="pytriton",
            title="PyTriton, dynamic batcher",
            packages="pytriton",
            command=("python", "pytriton_binding.py"),
            protocol=KSERVE,
        ),
    )
}


@dataclass(frozen=True, kw_only=True)
class Limit:
    """What an engine does without a server: a process a core, each with one thread, exact lengths, tokens at hand."""

    ours: Ours

    @property
    def name(self) -> str:
        return f"limit of {self.ours.limit}"

    @property
    def title(self) -> str:
        engine = self.ours.title.split(",")[0]
        return f"{engine}, offline limit"

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", "benches.serving.offline", str(find_version(self.ours))]


Contender = Ours | Peer | Limit


def find_version(ours: Ours) -> Path:
    """Return the folder that holds the graph of the newest version."""
    folder = ours.repository / ours.model
    return max((path for path in folder.iterdir() if path.name.isdecimal()), key=lambda path: int(path.name))


def encode_bodies(protocol: Protocol, texts: Sequence[str]) -> list[str]:
    """Return a request's body for each text."""
    return [json.dumps(protocol.body(text), ensure_ascii=False) for text in texts]
