"""`config.pbtxt`, read and written through Triton's own protobuf messages. Needs no torch."""

from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from ..errors import RepositoryError

CONFIG_FILE = "config.pbtxt"


def render_config(config: pb.ModelConfig) -> str:
    """Return the text of a `config.pbtxt`."""
    text: str = text_format.MessageToString(config, indent=0)
    return text


def parse_config(text: str) -> pb.ModelConfig:
    """Return the configuration in the text of a `config.pbtxt`.

    Raises:
        google.protobuf.text_format.ParseError: It is none.
    """
    return text_format.Parse(text, pb.ModelConfig())


def read_config(folder: Path) -> pb.ModelConfig | None:
    """Return the configuration of the model in `folder`, or None where it has none.

    Raises:
        RepositoryError: The file cannot be read, or is not a configuration.
    """
    path = folder / CONFIG_FILE
    try:
        return parse_config(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as exc:
        raise RepositoryError(
            f"{path} cannot be read", got=exc.strerror or str(exc), remedy="check the disk and the permissions"
        ) from exc
    except (UnicodeDecodeError, text_format.ParseError) as exc:
        raise RepositoryError(
            f"{path} cannot be read",
            expected="a Triton model configuration",
            got=" ".join(str(exc).split()),
            remedy="move it out of the repository or pass another --name",
        ) from exc
