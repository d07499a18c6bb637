"""One model of a repository and all of them, as far as files tell; shared by the rules."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from ..errors import RepositoryError
from ..repository.config_file import CONFIG_FILE
from ..repository.contents import CLAIM_FILE, list_versions
from ..targets import Target
from . import onnx_file
from .backends import BACKEND_OF_FILE, BACKENDS, PLATFORMS
from .source import Node, find_ignored, find_line, scan

# Beyond these it is not a configuration, and what reads it gives up in other ways.
_MAX_CONFIG_BYTES = 16 << 20
_MAX_DEPTH = 100

# Bytes that no text has, but for comments and strings, which protobuf lets hold any.
_CONTROL = re.compile(rb"[\x00-\x08\x0e-\x1f\x7f]")
_MAY_HOLD_ANY = re.compile(rb"""\#[^\n]*|"(?:[^"\\\n]|\\.)*"?|'(?:[^'\\\n]|\\.)*'?""")

# Where Triton looks for a configuration of the name that `--model-config-name` says (core, constants.h).
VARIANTS_FOLDER = "configs"


@dataclass(frozen=True)
class Model:
    """One folder of a repository.

    Attributes:
        folder: The folder, whose name Triton takes for the model's.
        target: The release that is to load it.
        variant: What tritonserver gets as `--model-config-name`; empty without.
    """

    folder: Path
    target: Target
    variant: str = ""

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.folder.name

    @property
    def config_path(self) -> Path:
        """Where its configuration is, or would be; that of the variant where it has one."""
        variant = self.folder / VARIANTS_FOLDER / f"{self.variant}.pbtxt"
        return variant if self.variant and variant.exists() else self.folder / CONFIG_FILE

    @cached_property
    def unreadable(self) -> str:
        """Why its configuration cannot be read, empty where it can or is not there."""
        path = self.config_path
        if not path.exists() or path.is_dir():
            return ""
        if not path.is_file():
            return "it is not a regular file"
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            return f"it has more than {_MAX_CONFIG_BYTES} bytes"
        content = path.read_bytes()
        if _CONTROL.search(_MAY_HOLD_ANY.sub(b"", content)):
            return "it is not text"
        depth = deepest = 0
        for byte in content:
            depth += (byte in b"{<") - (byte in b"}>")
            deepest = max(deepest, depth)
        return f"its braces are nested more than {_MAX_DEPTH} deep" if deepest > _MAX_DEPTH else ""

    @cached_property
    def text(self) -> str | None:
        """The text of its configuration, None where it has none."""
        if self.unreadable:
            return ""
        try:
            # Comments may be in any encoding.
            return self.config_path.read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None

    @cached_property
    def source(self) -> Node:
        """The fields of that text with their lines."""
        return scan(self.text or "")

    @cached_property
    def ignored(self) -> list[tuple[str, int]]:
        """Rules that comments of the configuration switch off for this model, with their lines."""
        return list(find_ignored(self.text or ""))

    @cached_property
    def parsed(self) -> pb.ModelConfig | text_format.ParseError:
        """The configuration but for the fields that nobody knows; or why there is none."""
        if self.unreadable:
            return text_format.ParseError(self.unreadable)
        try:
            return text_format.Parse(self.text or "", pb.ModelConfig(), allow_unknown_field=True)
        except text_format.ParseError as exc:
            return exc

    @property
    def config(self) -> pb.ModelConfig:
        """The configuration; empty where it cannot be parsed or is not there."""
        return self.parsed if isinstance(self.parsed, pb.ModelConfig) else pb.ModelConfig()

    @cached_property
    def versions(self) -> list[int]:
        """Numbers of its version folders."""
        return list_versions(self.folder)

    @cached_property
    def served(self) -> list[int]:
        """Versions that its policy loads."""
        policy = self.config.version_policy
        choice = policy.WhichOneof("policy_choice")
        if choice == "all":
            return self.versions
        if choice == "specific":
            return [version for version in self.versions if version in policy.specific.versions]
        return self.versions[-max(policy.latest.num_versions, 1) :]

    @property
    def is_model(self) -> bool:
        """Whether anything says that the folder is meant as a model."""
        return self.text is not None or bool(self.versions)

    @property
    def is_inactive(self) -> bool:
        """Whether modelyard has published it and serves none of its versions."""
        return self.text is None and (self.folder / CLAIM_FILE).is_file()

    @property
    def is_ensemble(self) -> bool:
        """Whether it is made of others."""
        return bool(self.config.platform == "ensemble" or self.config.HasField("ensemble_scheduling"))

    @cached_property
    def backend(self) -> str:
        """The backend that Triton takes; empty for an ensemble and where there is none."""
        if self.config.backend:
            return str(self.config.backend)
        if self.config.platform:
            return PLATFORMS.get(self.config.platform, "")
        for version in reversed(self.versions):
            for file, backend in BACKEND_OF_FILE.items():
                if (self.folder / str(version) / file).exists():
                    return backend
        return self.name.rpartition(".")[2] if "." in self.name else ""

    @property
    def model_files(self) -> tuple[str, ...]:
        """Names that the file may have which the backend loads; empty where that is not known."""
        if self.config.default_model_filename:
            return (self.config.default_model_filename,)
        return BACKENDS[self.backend].files if self.backend in BACKENDS else ()

    def find_model_file(self, version: int) -> Path | None:
        """Return what the backend loads of a version, None where it is not there."""
        paths = (self.folder / str(version) / name for name in self.model_files)
        return next((path for path in paths if path.exists()), None)

    @cached_property
    def graphs(self) -> dict[Path, onnx_file.Graph | str]:
        """File → the ONNX graph in it, or why it is none, of each served version that ONNX Runtime is to run."""
        if self.backend != "onnxruntime":
            return {}
        files = (self.find_model_file(version) for version in self.served)
        return {path: onnx_file.read(path) for path in files if path is not None}

    def line(self, *path: str | int) -> int:
        """Return the line of a field of the configuration, see `find_line`."""
        return find_line(self.source, *path)


@dataclass(frozen=True)
class Repository:
    """All folders of a repository, by name."""

    folder: Path
    models: dict[str, Model]


def list_variants(folder: Path) -> list[str]:
    """Return the names that `--model-config-name` may say of a repository, without that of no name."""
    return sorted({path.stem for path in folder.glob(f"*/{VARIANTS_FOLDER}/*.pbtxt")})


def open_repository(folder: Path, target: Target, variant: str = "") -> Repository:
    """Return what lies in a repository, as tritonserver takes it with or without a variant.

    Raises:
        RepositoryError: There is no such folder, or it is empty, or a model itself.
    """
    if not folder.is_dir():
        raise RepositoryError(
            f"there is no repository {folder}",
            expected="a folder of models",
            got="a file" if folder.exists() else "nothing",
            remedy="pass the folder that tritonserver gets as --model-repository",
        )
    # A model may be called as a version is, which has neither versions nor a configuration.
    has_version = any(not Model(folder / str(number), target).is_model for number in list_versions(folder))
    if (folder / CONFIG_FILE).is_file() or has_version:
        raise RepositoryError(
            f"{folder} is a model, not a repository",
            expected="a folder of models",
            got=CONFIG_FILE if (folder / CONFIG_FILE).is_file() else "a numbered version",
            remedy=f"pass the folder that it lies in, {folder.absolute().parent}",
        )
    folders = (entry for entry in sorted(folder.iterdir()) if entry.is_dir())
    models = {entry.name: Model(entry, target, variant) for entry in folders}
    if not models:
        raise RepositoryError(
            f"{folder} holds no models",
            expected="a folder for each model",
            got="none",
            remedy="pass the folder that tritonserver gets as --model-repository",
        )
    return Repository(folder, models)
