"""A version of one repository, copied into another with its proof, byte for byte. Needs no torch."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tritonclient.grpc import model_config_pb2 as pb

from ..engines.vllm_arguments import ARGUMENTS_FILE, renumber_arguments
from ..errors import RepositoryError
from ..proof.report_page import PAGE_FILE
from .activation import check_exchangeable, switch
from .change import change
from .config_file import pin_config
from .contents import (
    CONFIGS_FOLDER,
    check_owners,
    check_published,
    find_active_version,
    find_free_version,
    find_published_config,
    list_versions,
)
from .copying import add_copy, read_whole_sums
from .integrity import check_whole
from .lock import check_destination
from .removal import remove_leftovers
from .use import use
from .version import PUBLICATION_FILE, Version, find_version


@dataclass(frozen=True, kw_only=True)
class Promotion:
    """What a promotion led to.

    Attributes:
        name: The public model.
        source: The version that was copied.
        version: The version of the other repository that holds the same.
        active: The version that is active there now, 0 where none is.
        outcome: `created` a version there, `switched` to one that holds the same, or left all `unchanged`.
    """

    name: str
    source: int
    version: int
    active: int
    outcome: Literal["created", "switched", "unchanged"]


def promote(
    repository: Path, name: str, version: int | None, *, destination: Path, activates: bool = True
) -> Promotion:
    """Copy a version into another repository, where it keeps its number if that is free and higher than the others.

    Its files are hashed before and after, and have to be what its proof was made of.

    Args:
        repository: Where it was published; is only read.
        name: The public model.
        version: The number; the active one if left out.
        destination: The other repository, which is made if it is not there.
        activates: Whether it becomes the active version there.

    Raises:
        RepositoryError: There is no such version, a file of it is not as it was published, the name is taken there by
            another model or one of other tensors, or the disk fails.
    """
    check_published(repository, name)
    # `Path.resolve` fails over a link to itself, which is refused where it is written to.
    places = Path(os.path.realpath(destination)), Path(os.path.realpath(repository))
    if places[0].is_relative_to(places[1]) or places[1].is_relative_to(places[0]):
        raise RepositoryError(
            f"{name} cannot be promoted to {destination}",
            expected="another repository, neither inside of this one nor around it",
            got="the one that it is in" if places[0] == places[1] else f"'{places[0]}', with {places[1]}",
            remedy="pass another --to, or use `activate`",
        )
    chosen = find_version(repository, name, _find_active(repository, name) if version is None else version)
    with use(chosen.folder):
        return _add(chosen, read_whole_sums(chosen, "promoted"), destination, activates)


def _find_active(repository: Path, name: str) -> int:
    active = find_active_version(repository, name)
    if not active:
        raise RepositoryError(
            f"{name} in {repository} has no active version",
            expected="one, or a number",
            got="neither",
            remedy="say which version is to be promoted",
        )
    return active


def _add(chosen: Version, sums: Mapping[Path, str], destination: Path, activates: bool) -> Promotion:
    name, configs = chosen.name, chosen.read_configs()
    check_destination(destination, name)
    with change(destination, name, "promoted to") as undo:
        check_owners(destination, name, configs)
        check_exchangeable(_read_published(destination, name, configs), configs)
        remove_leftovers(destination, name, configs)
        number = _find_equal(chosen, destination)
        created = number is None
        number = number or max(find_free_version(destination, configs), chosen.number)
        pinned = {part: pin_config(config, version=number, served=[number]) for part, config in configs.items()}
        if created:
            version = Version(repository=destination, name=name, number=number)
            # What the vLLM backend is told names the number.
            documents = {
                path.name: renumber_arguments(path.read_text(encoding="utf-8"), name, number)
                for path in sums
                if path.name == ARGUMENTS_FILE
            }
            add_copy(chosen, version, sums, pinned, documents, undo)
        switched = activates and switch(destination, name, pinned, undo)
        active = find_active_version(destination, name)
    outcome: Literal["created", "switched", "unchanged"] = "switched" if switched else "unchanged"
    return Promotion(
        name=name, source=chosen.number, version=number, active=active, outcome="created" if created else outcome
    )


def _read_published(repository: Path, name: str, parts: Mapping[str, pb.ModelConfig]) -> dict[str, pb.ModelConfig]:
    """Return the configurations of the model that is there, if any version of it is."""
    if not list_versions(repository / name):
        return {}
    return {part: config for part in parts if (config := find_published_config(repository, name, part))}


def _find_equal(chosen: Version, destination: Path) -> int | None:
    """Return the newest version there that holds, was proven and is served the same, and is as it was published."""
    wanted, intent = _read_content(chosen), _read_intent(chosen)
    for number in reversed(list_versions(destination / chosen.name)):
        there = Version(repository=destination, name=chosen.name, number=number)
        if _read_content(there) == wanted and _read_intent(there) == intent:
            check_whole(there)
            return number
    return None


def _read_intent(version: Version) -> list[dict[str, pb.ModelConfig]]:
    """Return the configurations, usual ones and those of variants, without the number that they name."""
    return [
        {f"{variant}/{part}": pin_config(config, version=0, served=[]) for part, config in configs.items()}
        for variant, configs in {"": version.read_configs(), **version.read_variants()}.items()
    ]


def _read_content(version: Version) -> dict[tuple[str, ...], str]:
    """Return Triton model and file → SHA-256 of what is the same wherever a version is."""
    content = {}
    for path, digest in version.read_sums().items():
        part, _, *file = path.relative_to(version.repository).parts
        if file[0] not in (CONFIGS_FOLDER, PAGE_FILE, PUBLICATION_FILE, ARGUMENTS_FILE):
            place = (part, *file)
            content[place] = digest
    return content
