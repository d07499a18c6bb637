"""What Sentence-Transformers keeps beside a model: `modules.json`, and a folder for each module that it names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from ..remedies import RECOPY
from ..storage.paths import check_inside, has_file, read_json, read_json_if_any

MODULES_FILE = "modules.json"
# What it records of the whole model.
RECORD_FILE = "config_sentence_transformers.json"

# In the order in which Sentence-Transformers looks for them; before 3.0 it named them after the model's type.
TRANSFORMER_FILES = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)


# What each of these modules does is said in a file of its own; of none of the others is it known to need one.
SETTINGS_FILE = "config.json"
_WITH_SETTINGS = ("Pooling", "Dense", "LayerNorm")


@dataclass(frozen=True, kw_only=True)
class SentenceModule:
    """One step from a text to its vector.

    Attributes:
        kind: Name of its class, such as `Pooling`.
        folder: Folder with its settings and weights; the model's own for the transformer.
        entry: What `modules.json` says of it.
    """

    kind: str
    folder: Path
    entry: dict[str, Any]


def read_sentence_modules(directory: Path) -> tuple[SentenceModule, ...] | None:
    """Return the modules of the model in `directory`, in their order; None where Sentence-Transformers recorded none.

    Raises:
        CheckpointError: `modules.json` is not a list of modules, or one of them lies outside its folder.
    """
    home = find_sentence_home(directory)
    if home is None:
        return None
    entries = read_json(home / MODULES_FILE)
    modules = []
    for entry in entries if isinstance(entries, list) else [entries]:
        if not _is_entry(entry):
            raise CheckpointError(
                f"{home / MODULES_FILE} cannot be read",
                expected="a list of modules, each with its type and path",
                got=repr(entry)[:100],
                remedy=RECOPY,
            )
        folder = home / entry["path"]
        # A module without settings, such as Normalize, has an empty folder, which Git does not keep.
        check_inside(folder, home)
        modules.append(SentenceModule(kind=entry["type"].rpartition(".")[2], folder=folder, entry=entry))
    return tuple(modules)


def find_sentence_home(directory: Path) -> Path | None:
    """Return the folder whose `modules.json` is about the model in `directory`, if there is one.

    That is `directory` itself, or the folder above where the transformer has one of its own, `0_Transformer`, as
    Sentence-Transformers saved before 2.0.

    Raises:
        CheckpointError: `modules.json` is there and no regular file, or the one above is not JSON.
    """
    if has_file(directory / MODULES_FILE):
        return directory
    above = directory.absolute().parent
    if directory.name[:1].isdigit() and has_file(above / MODULES_FILE):
        first = read_json(above / MODULES_FILE)
        entry: Any = first[0] if isinstance(first, list) and first else None
        if _is_entry(entry) and entry["path"] == directory.name:
            return above
    return None


def tell_missing_settings(directory: Path) -> tuple[str, ...]:
    """Return what is missing of the modules that Sentence-Transformers recorded, as a copy without folders lacks it.

    Raises:
        CheckpointError: `modules.json` is not a list of modules, or one of them lies outside its folder.
    """
    modules = read_sentence_modules(directory) or ()
    missing = [
        f"{module.entry['path']}/{SETTINGS_FILE}, which says what the {module.kind} in {MODULES_FILE} does"
        for module in modules
        if module.kind in _WITH_SETTINGS and not read_json_if_any(module.folder / SETTINGS_FILE)
    ]
    unnamed = [f"{MODULES_FILE}'s word on {name}, which lies there" for name in list_unnamed_modules(directory)]
    return (*missing, *unnamed, *tell_missing_limits(directory))


def list_unnamed_modules(directory: Path) -> tuple[str, ...]:
    """Return the folders of modules that `modules.json` does not name, as that of another model does not.

    Of several of one kind for one place, such as `2_Dense_256` and `2_Dense_1024`, it names the one that is used.

    Raises:
        CheckpointError: `modules.json` is not a list of modules, or one of them lies outside its folder.
    """
    home, modules = find_sentence_home(directory), read_sentence_modules(directory)
    if home is None or modules is None:
        return ()
    named = {_find_place(module.entry["path"]) for module in modules}
    found = [folder.name for folder in home.glob("[0-9]*_*") if (folder / SETTINGS_FILE).is_file()]
    return tuple(sorted(name for name in found if _find_place(name) not in named))


def _find_place(name: str) -> tuple[str, ...]:
    return tuple(name.split("_")[:2])


def tell_missing_limits(directory: Path) -> tuple[str, ...]:
    """Return which files are missing that Sentence-Transformers always writes, and that say how long a text is read.

    Raises:
        CheckpointError: One of them is there and cannot be read.
    """
    if not any(module.kind == "Transformer" for module in read_sentence_modules(directory) or ()):
        return ()
    has = {
        TRANSFORMER_FILES[0]: bool(read_transformer_settings(directory)),
        "tokenizer_config.json": has_file(directory / "tokenizer_config.json"),
    }
    return tuple(f"{name}, which says how long a text is read" for name, is_there in has.items() if not is_there)


def read_transformer_settings(directory: Path) -> dict[str, Any]:
    """Return what Sentence-Transformers recorded of the transformer in `directory`; nothing where it did not.

    Raises:
        CheckpointError: The file cannot be read.
    """
    for name in TRANSFORMER_FILES:
        settings = read_json_if_any(directory / name)
        if settings:
            return settings
    return {}


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, dict) and all(
        isinstance(entry.get(key), str) and "\0" not in entry[key] for key in ("type", "path")
    )
