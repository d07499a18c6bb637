"""`config.pbtxt`, read and written through Triton's own protobuf messages. Needs no torch."""

import errno
from collections.abc import Iterable
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from ..errors import RepositoryError

CONFIG_FILE = "config.pbtxt"

# A hundred times what the largest published one has; the server reads no more either.
_MAX_CONFIG_BYTES = 1 << 20

# Parameters that an operator writes into a configuration, and that are not ours to lose.
_OPERATORS = ("modelyard_blocked_s", "modelyard_busy_s")


class DamagedConfigError(RepositoryError):
    """What lies where a configuration should be is none."""


def render_config(config: pb.ModelConfig) -> str:
    """Return the text of a `config.pbtxt`."""
    text: str = text_format.MessageToString(config, indent=0)
    return text


def parse_config(text: str) -> pb.ModelConfig:
    """Return the configuration in the text of a `config.pbtxt`.

    Raises:
        google.protobuf.text_format.ParseError: It is not one.
    """
    return text_format.Parse(text, pb.ModelConfig())


def read_config(folder: Path, file_name: str = CONFIG_FILE) -> pb.ModelConfig | None:
    """Return the configuration of the model in `folder`, or None where it has none.

    Raises:
        DamagedConfigError: The file is not a configuration.
        RepositoryError: It cannot be read.
    """
    path = folder / file_name
    refuse_no_file(path)
    try:
        if (size := path.stat().st_size) > _MAX_CONFIG_BYTES:
            raise _refuse_damaged(path, f"{size} bytes")
        config = parse_config(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as exc:
        raise RepositoryError(
            f"{path} cannot be read", got=exc.strerror or str(exc), remedy="check the disk and the permissions"
        ) from exc
    except (UnicodeDecodeError, text_format.ParseError) as exc:
        raise _refuse_damaged(path, " ".join(str(exc).split())) from exc
    if not config.ListFields():
        raise _refuse_damaged(path, "an empty one")
    return config


def read_regular(path: Path) -> str:
    """Return the text of a file of a published version, whatever lies there in its place.

    Raises:
        OSError: It cannot be read, or is no file: a pipe would be waited for, and a device never ends.
        UnicodeDecodeError: It is not UTF-8.
    """
    if kind := describe_no_file(path):
        raise OSError(errno.EINVAL, f"it is {kind}", str(path))
    return path.read_text(encoding="utf-8")


def _refuse_damaged(path: Path, got: str) -> DamagedConfigError:
    return DamagedConfigError(
        f"{path} cannot be read",
        expected=f"a Triton model configuration of at most {_MAX_CONFIG_BYTES} bytes",
        got=got,
        remedy="move this file out of the repository, then do it again",
    )


def describe_no_file(path: Path) -> str:
    """Return what lies at `path` if it is no file: none can replace a folder, and a pipe never ends. Else nothing."""
    try:
        path.stat()
    except OSError as exc:
        return "a link that leads to itself" if exc.errno == errno.ELOOP else ""
    if path.is_file():
        return ""
    return "a folder" if path.is_dir() else "a pipe, a socket or a device"


def refuse_no_file(path: Path) -> None:
    """Refuse what lies in the place of a configuration and is no file.

    Raises:
        DamagedConfigError: There is such a thing.
    """
    if kind := describe_no_file(path):
        raise DamagedConfigError(
            f"{path} is {kind}",
            expected="a Triton model configuration, or nothing",
            got=kind,
            remedy="move it out of the repository, then do it again",
        )


def find_config(folder: Path, file_name: str = CONFIG_FILE) -> pb.ModelConfig | None:
    """Return the configuration of the model in `folder`, or None where it has none or what lies there is none.

    Raises:
        RepositoryError: The file cannot be read.
    """
    try:
        return read_config(folder, file_name)
    except DamagedConfigError:
        return None


def pin_config(config: pb.ModelConfig, *, version: int, served: Iterable[int]) -> pb.ModelConfig:
    """Return the configuration as it is where `version` is the active one.

    Args:
        config: Configuration of a step, an ensemble or a lone model.
        version: What an ensemble pins its steps to.
        served: Versions that a step loads.
    """
    pinned = pb.ModelConfig()
    pinned.CopyFrom(config)
    for step in pinned.ensemble_scheduling.step:
        step.model_version = version
    pinned.version_policy.specific.ClearField("versions")
    pinned.version_policy.specific.versions.extend(sorted(set(served)))
    return pinned


def join_configs(old: pb.ModelConfig, new: pb.ModelConfig, *, served: Iterable[int]) -> pb.ModelConfig:
    """Return the configuration of a step under which both the old and the new version load, and no other.

    It is the new one, warmed up only with requests that both are made for: one may be too long for the old version.
    """
    joined = pin_config(new, version=0, served=served)
    joined.ClearField("model_warmup")
    joined.model_warmup.extend(warmup for warmup in new.model_warmup if warmup in old.model_warmup)
    return joined


def keep_operators_parameters(old: pb.ModelConfig, new: pb.ModelConfig) -> pb.ModelConfig:
    """Return the new configuration with what an operator has written into the old one."""
    kept = pb.ModelConfig()
    kept.CopyFrom(new)
    for key in _OPERATORS:
        if key in old.parameters and key not in new.parameters:
            kept.parameters[key].CopyFrom(old.parameters[key])
    return kept
