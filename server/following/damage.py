"""Whether a model is in the repository as it was published and loaded, and what is said where it is not."""

from dataclasses import replace
from pathlib import Path

from ..errors import RolloutError
from .model_text import CONFIG_FILE
from .published import Loaded, Published, find_partial, list_versions
from .sums import GOLDEN_FILE, LOCK_FILE, SUMS_FILE, FileSums


def compare(repository: Path, sums: FileSums, known: Loaded, wanted: Published, *, asks: bool) -> Loaded | None:
    """Return the version that was loaded as it is wanted now, with why it cannot be had if that is so.

    Its configuration may be another. Its files may only be as a whole, as another publication of the same number, for
    which None is returned: that one was not loaded.

    Args:
        repository: The model repository.
        sums: Tells which files have changed.
        known: What was loaded.
        wanted: What the repository says of the same version now.
        asks: Whether the answers that it was published with are looked at as well.
    """
    changed = damage = sums.find_changed(known.files, since="loaded")
    is_lost = not known.published.sums.keys() <= wanted.sums.keys()
    # The sums say which publication it is. A file may be another at one look and the right one again at the next.
    is_other = is_lost or any(known.files.get(path, digest) != digest for path, digest in wanted.sums.items())
    if changed and wanted.sums:
        damage = find_partial(repository, wanted, sums)
    if wanted.damage:
        # What has become of the sums says less than that what is loaded is another.
        damage = (changed if SUMS_FILE in wanted.damage else "") or wanted.damage
    elif is_other and changed and not damage:
        return None
    elif is_other and not changed:
        path = repository / wanted.name / str(wanted.version) / SUMS_FILE
        damage = f"{path} is {'not the one that it was loaded with' if path.exists() else 'missing'}"
    elif not damage and asks and known.published.configs == wanted.configs:
        # Who starts on other answers, or checks a server, says more of them than that.
        damage = sums.find_changed(known.asked, since="loaded")
    if damage:
        wanted = replace(wanted, configs={}, damage=damage)
    return replace(known, published=wanted)


def find_rest(folder: Path, version: int) -> str:
    """Return what is missing of a served model of which something is left; empty where nothing is."""
    if folder.is_symlink() and not folder.exists():
        return f"{folder} is a link that leads nowhere"
    if list_versions(folder):
        return f"{folder / CONFIG_FILE} is missing"
    if not (folder / CONFIG_FILE).exists():
        return ""
    return f"{folder / str(version)} is missing" if version else f"{folder} holds no version"


def refuse_damaged(wanted: Published, old: Published | None) -> RolloutError:
    """Return why a model is not served as the repository has it, and what becomes of the one that is served."""
    consequence = f"{old.title} is served as before" if old else "it is not served"
    return RolloutError(
        f"{wanted.title} cannot be served",
        expected="whole files",
        got=wanted.damage,
        remedy=f"{consequence}; {_find_remedy(wanted)}",
    )


def _find_remedy(wanted: Published) -> str:
    if SUMS_FILE in wanted.damage or GOLDEN_FILE in wanted.damage:
        # Without them nothing would say what the files were, or what they should answer.
        return "restore it, or promote or export that version again"
    if not wanted.version:
        # It may have been written by hand, of which no version can be activated.
        return "bring that back whole, or take the folder out of the repository"
    if wanted.damage.endswith("is missing") or LOCK_FILE in wanted.damage:
        return "bring it back, or activate another version"
    return "mend that, or move the file away and activate a version"
