"""What tritonserver is shown: a folder of the launcher's own, with links to the versions that it serves.

The repository says what should be served; it may be read-only, shared with other servers, and change at any moment. The
overlay says what is served. So a tritonserver that is restarted serves what was seen to answer before, and a new
version is tried beside the old one without a word written into the repository.
"""

import shutil
from collections.abc import Iterable
from pathlib import Path

from .model_text import CONFIG_FILE

# What the exporter calls what it is about to rename.
_STAGED = "staging-"


def _is_ours(name: str) -> bool:
    """Tell whether a file beside the versions is a configuration or about to become one, and gone in a moment."""
    return name == CONFIG_FILE or name.startswith(_STAGED) or name == f"inactive-{CONFIG_FILE}"


class Overlay:
    """Model folders made of a configuration of their own and links to everything else.

    Args:
        directory: A folder of the launcher's own; is made if it is not there.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(exist_ok=True)

    def show(self, name: str, config: str, source: Path, versions: Iterable[int]) -> None:
        """Show these versions of the model folder `source` under `name`, in place of what was shown there.

        tritonserver sees a change by the time at which the configuration was written.

        Args:
            name: Name of the model; `source` may have another.
            config: The text of its `config.pbtxt`.
            source: A model folder of the repository.
            versions: Versions to show; what else lies there, such as labels, is shown as well.

        Raises:
            OSError: It cannot be written.
        """
        folder = self.directory / name
        folder.mkdir(exist_ok=True)
        wanted = {str(version) for version in versions}
        wanted |= {entry.name for entry in source.iterdir() if entry.is_file() and not _is_ours(entry.name)}
        for entry in folder.iterdir():
            if entry.is_symlink() and entry.name not in wanted:
                entry.unlink()
        for entry_name in wanted:
            if not (folder / entry_name).is_symlink():
                (folder / entry_name).symlink_to((source / entry_name).absolute())
        self.write_config(name, config)

    def shows(self, name: str, version: str) -> bool:
        """Tell whether a version of a model is shown."""
        return (self.directory / name / version).is_symlink()

    def list_versions(self, name: str) -> list[Path]:
        """Return the folders of the versions of a model that are shown."""
        folder = self.directory / name
        return sorted(entry for entry in folder.iterdir() if entry.name.isdecimal()) if folder.is_dir() else []

    def write_config(self, name: str, config: str) -> None:
        """Give a model that is shown another configuration.

        Raises:
            OSError: It cannot be written; names the file, which a write to a full disk does not.
        """
        path = self.directory / name / CONFIG_FILE
        try:
            path.write_text(config, encoding="utf-8", errors="surrogateescape")
        except OSError as exc:
            raise OSError(exc.errno, exc.strerror, str(path)) from exc

    def read_config(self, name: str) -> str:
        """Return the configuration under which a model is shown."""
        return (self.directory / name / CONFIG_FILE).read_text(encoding="utf-8", errors="surrogateescape")

    def hide(self, name: str) -> None:
        """Show nothing under `name` any more."""
        shutil.rmtree(self.directory / name, ignore_errors=True)
