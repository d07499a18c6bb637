"""A version that is served otherwise: the files of another under the next number, with their proof. Needs no torch."""

from collections.abc import Mapping
from typing import Any

from tritonclient.grpc import model_config_pb2 as pb

from .activation import switch
from .change import change
from .config_file import pin_config
from .contents import find_free_version
from .copying import add_copy, read_whole_sums
from .lock import check_destination
from .lockfile import LOCK_FILE, read_lock, render_lock
from .removal import remove_leftovers
from .use import use
from .version import PUBLICATION_FILE, Version, render_publication


def serve_otherwise(chosen: Version, configs: Mapping[str, pb.ModelConfig], serving: Mapping[str, Any]) -> int:
    """Publish the files of a version once more, to be served otherwise, and make that version the active one.

    Nothing that was proven changes, so the proof stays. What an export with these options would record of them is
    recorded, so that such an export finds nothing to do.

    Args:
        chosen: The version.
        configs: Triton model → its changed configuration.
        serving: Serving option → value, of those that the configurations say otherwise than the version's own.

    Returns:
        The number of the new version.

    Raises:
        RepositoryError: A file of the version is not as it was published, or the disk fails.
    """
    repository, name = chosen.repository, chosen.name
    check_destination(repository, name)
    with use(chosen.folder):
        sums = read_whole_sums(chosen, "served otherwise")
        documents = {
            LOCK_FILE: render_lock(_change_lock(chosen, serving)),
            PUBLICATION_FILE: render_publication(chosen.read_publication()),
        }
        with change(repository, name, "served otherwise in") as undo:
            remove_leftovers(repository, name, configs)
            number = find_free_version(repository, configs)
            pinned = {part: pin_config(config, version=number, served=[number]) for part, config in configs.items()}
            version = Version(repository=repository, name=name, number=number)
            add_copy(chosen, version, sums, pinned, documents, undo)
            switch(repository, name, pinned, undo)
    return number


def _change_lock(chosen: Version, serving: Mapping[str, Any]) -> dict[str, Any]:
    lock = read_lock(chosen.folder / LOCK_FILE)
    options = lock["options"]
    # A release that knew fewer options recorded fewer.
    return {**lock, "options": {**options, "serving": {**options.get("serving", {}), **serving}}}
