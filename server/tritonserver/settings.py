"""What the launcher was asked to serve, and how."""

from dataclasses import dataclass
from pathlib import Path

from ..endpoints import Endpoints
from .control_key import ControlKey
from .installation import Installation


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to serve, and how.

    Attributes:
        installation: The tritonserver.
        repository: Model repository.
        endpoints: Where to listen.
        key: Key of the control endpoints.
        run_directory: Folder of the launcher's own, with the assembled `backends`.
        verbose: Whether to show the whole log of tritonserver.
        passed_options: Options for tritonserver that we have no opinion of.
        follows: Whether what becomes active in the repository is served without a restart.
        variant: Name of the configurations that take the place of the usual ones, where a version has them.
    """

    installation: Installation
    repository: Path
    endpoints: Endpoints
    key: ControlKey
    run_directory: Path
    verbose: bool
    passed_options: tuple[str, ...] = ()
    follows: bool = True
    variant: str = ""

    @property
    def backends(self) -> Path:
        """Folder of the assembled backends."""
        return self.run_directory / "backends"

    @property
    def interpreter(self) -> Path:
        """Folder of links to this interpreter; it is there where its own paths are not ASCII."""
        return self.run_directory / "python"

    @property
    def caches(self) -> Path:
        """Folder of the response caches that came with tritonserver; it may not be there."""
        return self.installation.backends.parent / "caches"

    @property
    def overlay(self) -> Path:
        """Folder of what tritonserver is shown; it may not be there yet."""
        return self.run_directory / "models"
