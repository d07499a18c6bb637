"""Rules on the configuration as a whole: whether it can be read, what runs the model, what is left to be guessed."""

from collections.abc import Iterator

from google.protobuf import text_format
from google.protobuf.descriptor import Descriptor
from tritonclient.grpc import model_config_pb2 as pb

from .backends import BACKENDS, PLATFORMS
from .finding import Problem
from .model import Model, Repository
from .source import Node
from .words import find_nearest

# Fields that a release does not know, of those that the newest one knows: those that the protobuf messages inside
# libtritonserver 2.51 lack. Other releases were not looked at.
_LACKED = {"24.10": {"max_inflight_requests", "model_metrics"}}


def check_parses(model: Model, _: Repository) -> Iterator[Problem]:
    """Find what protobuf cannot read."""
    if isinstance(model.parsed, text_format.ParseError):
        what = " ".join(str(model.parsed).split())
        where = f"{model.parsed.GetLine()}:{model.parsed.GetColumn()} : "
        yield Problem(
            path=model.config_path,
            line=model.parsed.GetLine() or 1,
            what=f"the configuration cannot be parsed: {what.removeprefix(where).rstrip('.')}",
            instead="write it in the text form of protobuf, such as `max_batch_size: 8`",
        )


def check_fields(model: Model, _: Repository) -> Iterator[Problem]:
    """Find fields that no release knows."""
    for node, message in _walk(model.source, pb.ModelConfig.DESCRIPTOR):
        if node.name not in message.fields_by_name:
            near = find_nearest(node.name, message.fields_by_name)
            yield Problem(
                path=model.config_path,
                line=node.line,
                what=f"{message.name} has no field {node.name}",
                instead=f"write `{near}`" if near else "remove it",
            )


def check_newer_fields(model: Model, _: Repository) -> Iterator[Problem]:
    """Find fields that only releases after the target know."""
    lacked = _LACKED.get(model.target.release, set())
    for node, message in _walk(model.source, pb.ModelConfig.DESCRIPTOR):
        if node.name in lacked and node.name in message.fields_by_name:
            yield Problem(
                path=model.config_path,
                line=node.line,
                what=f"Triton {model.target.release} does not know the field {node.name}",
                instead="remove it, or pass a later --target",
            )


def check_name(model: Model, _: Repository) -> Iterator[Problem]:
    """Find a name that is not the folder's."""
    if model.config.name not in ("", model.name):
        yield Problem(
            path=model.config_path,
            line=model.line("name"),
            what=f"the model is called {model.config.name} in a folder called {model.name}",
            instead=f'write `name: "{model.name}"`, or rename the folder',
        )


def check_platform(model: Model, _: Repository) -> Iterator[Problem]:
    """Find a platform that Triton has no backend for."""
    platform = model.config.platform
    if platform and platform not in PLATFORMS and not model.config.backend:
        near = find_nearest(platform, [*PLATFORMS, *BACKENDS])
        word = "backend" if near in BACKENDS else "platform"
        yield Problem(
            path=model.config_path,
            line=model.line("platform"),
            what=f"there is no platform {platform}",
            instead=f'write `{word}: "{near}"`' if near else 'write `backend: "NAME"`',
        )


def check_backend(model: Model, _: Repository) -> Iterator[Problem]:
    """Find a backend that comes neither with Triton nor with modelyard, nor lies beside the model."""
    backend = model.config.backend
    if not backend or backend in BACKENDS:
        return
    folders = (model.folder, *(model.folder / str(version) for version in model.versions))
    if any((folder / f"libtriton_{backend}.so").exists() for folder in folders):
        return
    near = find_nearest(backend, BACKENDS)
    yield Problem(
        path=model.config_path,
        line=model.line("backend"),
        what=f"the backend {backend} does not come with Triton",
        instead=f'write `backend: "{near}"`' if near else "install it in the server's backend directory",
    )


def check_platform_and_backend(model: Model, _: Repository) -> Iterator[Problem]:
    """Find a platform of another backend than the one that is named."""
    platform, backend = model.config.platform, model.config.backend
    if platform in PLATFORMS and backend in {*PLATFORMS.values(), "ensemble"} - {PLATFORMS[platform]} and backend:
        yield Problem(
            path=model.config_path,
            line=model.line("platform"),
            what=f"the platform {platform} is not one of the backend {backend}",
            instead="remove `platform`" if platform != "ensemble" else "remove `backend`",
        )


def check_has_backend(model: Model, _: Repository) -> Iterator[Problem]:
    """Find a model of which neither configuration nor files say what runs it."""
    config = model.config
    is_said = config.backend or config.platform or model.backend
    if model.is_model and isinstance(model.parsed, pb.ModelConfig) and not (is_said or model.is_inactive):
        yield Problem(
            path=model.config_path,
            what="nothing says which backend runs the model",
            instead='write `backend: "onnxruntime"`, or the name of another one',
        )


def check_has_config(model: Model, _: Repository) -> Iterator[Problem]:
    """Find a model without a configuration."""
    if model.text is None and model.versions and not model.is_inactive:
        yield Problem(
            path=model.folder,
            what=f"{model.name} has no config.pbtxt, which only a server that completes configurations accepts",
            instead="write one, or start tritonserver without --disable-auto-complete-config",
        )


def check_complete(model: Model, _: Repository) -> Iterator[Problem]:
    """Find a configuration that leaves tensors to be guessed."""
    if model.text is None or not isinstance(model.parsed, pb.ModelConfig):
        return
    missing = [word for word in ("input", "output") if not getattr(model.config, word)]
    if missing:
        yield Problem(
            path=model.config_path,
            what=f"no {' and no '.join(missing)} is declared, which is then left to the backend, "
            "and not known at all to a server that completes nothing, such as `modelyard serve`",
            instead="write `" + "`, `".join(f"{w} [ {{ name: ... data_type: ... dims: ... }} ]" for w in missing) + "`",
        )


def check_says_batch(model: Model, _: Repository) -> Iterator[Problem]:
    """Find a model whose largest batch is left to be guessed."""
    guesses = model.backend in ("onnxruntime", "tensorrt", "tensorflow", "openvino")
    if model.text is not None and guesses and not model.source.find_all("max_batch_size"):
        yield Problem(
            path=model.config_path,
            what="max_batch_size is not written: a server that completes configurations may make 4 of it, others 0",
            instead="write `max_batch_size: 0`, or the size that is meant",
        )


def _walk(node: Node, message: Descriptor) -> Iterator[tuple[Node, Descriptor]]:
    for child in node.children:
        yield child, message
        field = message.fields_by_name.get(child.name)
        if field is not None and field.message_type is not None:
            yield from _walk(child, field.message_type)
