"""A published version: its folders, its documents, and the configurations that make it active. Needs no torch."""

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tritonclient.grpc import model_config_pb2 as pb

from ..errors import RepositoryError
from .config_file import CONFIG_FILE, pin_config, read_config, read_regular
from .contents import CONFIGS_FOLDER, GOLDEN_FILE, REPORT_FILE, list_parts, list_versions
from .lockfile import LOCK_FILE, read_lock
from .names import STEP_SUFFIXES

# When and from what it was published: the lock leaves that out, because it is of one day and one machine.
PUBLICATION_FILE = "publication.json"

# The hashes of every file of the version, as `sha256sum --check` reads them in the version's folder.
SUMS_FILE = "SHA256SUMS"

# What every release wrote, or all but the first ones did, into the folder of a public model's version.
_DOCUMENTS = (SUMS_FILE, GOLDEN_FILE, REPORT_FILE, LOCK_FILE, PUBLICATION_FILE, CONFIGS_FOLDER)

# As `sha256sum --check` reads it: a blank or an asterisk in front of the path.
_SUM = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")


@dataclass(frozen=True, kw_only=True)
class Version:
    """A version of a public model.

    Attributes:
        repository: Where it was published.
        name: The public model.
        number: Number of the version.
    """

    repository: Path
    name: str
    number: int

    @property
    def folder(self) -> Path:
        """Where its documents are, and those of its files that belong to the public model itself."""
        return self.repository / self.name / str(self.number)

    def find_folder(self, model_name: str) -> Path:
        """Return the folder of this version's files of one Triton model."""
        return self.repository / model_name / str(self.number)

    def list_files(self) -> list[Path]:
        """Return every file of it, of all Triton models.

        Raises:
            RepositoryError: A configuration cannot be read.
        """
        return [path for path in self._list_entries() if path.is_file()]

    def list_no_files(self) -> list[Path]:
        """Return everything in its folders that is neither a file nor a folder, such as a pipe or a link to a folder.

        Raises:
            RepositoryError: A configuration cannot be read.
        """
        entries = self._list_entries()
        return [path for path in entries if not path.is_file() and (path.is_symlink() or not path.is_dir())]

    def has_entries(self) -> bool:
        """Tell whether there is anything in its folders.

        Raises:
            RepositoryError: A configuration cannot be read.
        """
        return bool(self._list_entries())

    def _list_entries(self) -> list[Path]:
        folders = [self.find_folder(model_name) for model_name in list_parts(self.repository, self.name)]
        return [path for folder in folders for path in sorted(folder.rglob("*"))]

    def read_report(self) -> Mapping[str, Any]:
        """Return the verification report; empty where there is none that can be read."""
        return self._read_json(REPORT_FILE)

    def read_publication(self) -> Mapping[str, Any]:
        """Return when and from what it was published; empty for one of a release that did not record it."""
        return self._read_json(PUBLICATION_FILE)

    def read_lock(self) -> Mapping[str, Any]:
        """Return what it was made from and with; empty where there is no lock that can be read."""
        try:
            return read_lock(self.folder / LOCK_FILE)
        except RepositoryError:
            return {}

    def read_sums(self) -> dict[Path, str]:
        """Return file of the version → SHA-256 that it had; empty for one of a release without sums."""
        told = {self._find_summed(match[2]): match[1].lower() for match in self._match_sums() if match}
        return {path: digest for path, digest in told.items() if self._may_hold(path)}

    def read_golden_sum(self) -> str:
        """Return the SHA-256 of its recorded answers as they were published; empty where nobody recorded it."""
        return self.read_sums().get(self._find_summed(GOLDEN_FILE), "")

    def list_foreign_sums(self) -> list[str]:
        """Return what the sums name outside of the version's own folders, as they name it."""
        named = [match[2] for match in self._match_sums() if match]
        return sorted({path for path in named if not self._may_hold(self._find_summed(path))})

    def has_damaged_sums(self) -> bool:
        """Tell whether there are sums of which a line is none, as where they were cut."""
        matches = self._match_sums()
        return not all(matches) or (not matches and (self.folder / SUMS_FILE).is_file())

    def _find_summed(self, path: str) -> Path:
        # Of the repository's own path nothing is shortened: what stands in front of .. may be a link.
        return self.repository / os.path.normpath(Path(self.name, str(self.number), path))

    def _may_hold(self, path: Path) -> bool:
        """Tell whether a file at `path` would be one of the version, whether or not its folder is there."""
        return any(self.find_folder(f"{self.name}{end}") in path.parents for end in ("", *STEP_SUFFIXES))

    def _match_sums(self) -> list[re.Match[str] | None]:
        """Return what each line of the sums says, and None for one that says nothing."""
        try:
            lines = read_regular(self.folder / SUMS_FILE).split("\n")
        except (OSError, UnicodeDecodeError):
            return []
        # A whole last line ends as the others do.
        return [_SUM.fullmatch(line.rstrip("\r")) for line in lines[:-1]] + [None] * bool(lines[-1])

    def read_configs(self) -> dict[str, pb.ModelConfig]:
        """Return Triton model → its configuration while this version is the active one, the public model last.

        A release that did not keep them wrote but one, which differs in the pinned versions alone.

        Raises:
            RepositoryError: They cannot be read, or a part of the version is missing.
        """
        kept = self.folder / CONFIGS_FOLDER
        names = sorted(path.stem for path in kept.glob("*.pbtxt")) or list_parts(self.repository, self.name)
        configs = {}
        for model_name in sorted(names, key=lambda each: each == self.name):
            config = read_config(kept, f"{model_name}.pbtxt") or read_config(self.repository / model_name)
            if config is None or not self.find_folder(model_name).is_dir():
                raise RepositoryError(
                    f"version {self.number} of {self.name} in {self.repository} is not whole",
                    expected=f"{model_name}/{CONFIG_FILE} and {model_name}/{self.number}",
                    got="not both",
                    remedy="export it again, or remove the version",
                )
            configs[model_name] = pin_config(config, version=self.number, served=[self.number])
        return configs

    def read_variants(self) -> dict[str, dict[str, pb.ModelConfig]]:
        """Return variant → Triton model → its configuration on a server that is told the variant's name.

        Raises:
            RepositoryError: One cannot be read.
        """
        kept = self.folder / CONFIGS_FOLDER
        folders = sorted(entry for entry in kept.iterdir() if entry.is_dir()) if kept.is_dir() else []
        return {
            folder.name: {
                path.stem: config
                for path in sorted(folder.glob("*.pbtxt"))
                if (config := read_config(folder, path.name)) is not None
            }
            for folder in folders
        }

    def _read_json(self, file_name: str) -> Mapping[str, Any]:
        try:
            content = json.loads(read_regular(self.folder / file_name))
        except (OSError, ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) else {}


def list_recorded(repository: Path, name: str) -> list[int]:
    """Return the versions of a public model, in order, but for folders in which no publication has written anything.

    tritonserver takes such a folder for a version as well, but it was made by hand, or has lost all that it was.
    """
    versions = (Version(repository=repository, name=name, number=number) for number in list_versions(repository / name))
    return [version.number for version in versions if any((version.folder / each).exists() for each in _DOCUMENTS)]


def find_version(repository: Path, name: str, number: int) -> Version:
    """Return a version of a public model that is there.

    Raises:
        RepositoryError: There is none of that number.
    """
    numbers = list_versions(repository / name)
    if number not in numbers:
        raise RepositoryError(
            f"{name} in {repository} has no version {number}",
            expected=f"one of {', '.join(map(str, numbers))}" if numbers else "a published version",
            got=str(number),
            remedy="see `versions list`",
        )
    return Version(repository=repository, name=name, number=number)


def render_publication(facts: Mapping[str, Any]) -> str:
    """Return the text that says that a version is published now, and from what.

    Args:
        facts: `checkpoint`, the folder that it was exported from or the function that built the module; `kind`, what
            that is, in words; `task`, the name of what it is served as; and `warnings`, what is odd about it.
    """
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return json.dumps({**facts, "published": now}, indent=2) + "\n"


def render_sums(hashes: Mapping[str, str]) -> str:
    """Return the text of a file of sums, as `sha256sum` prints it."""
    return "".join(f"{digest}  {path}\n" for path, digest in sorted(hashes.items()))


def index_sums(versions: Iterable[Version]) -> dict[str, Path]:
    """Return SHA-256 → a file that is said to have it."""
    return {digest: path for version in versions for path, digest in version.read_sums().items()}
