"""Checkpoints that are named by their id on the hub, or by the address of a folder, brought to this machine.

Only files that the readers look at are fetched, and none of them is run: pickles are data here as they are from a disk.
Imports the hub's library and fsspec where they are needed: whoever names a folder does not wait for them.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from .errors import CheckpointError
from .locations import CACHE

# OWNER/NAME, and after an @ a branch, a tag or a commit. A name alone would be taken for a folder that is missing.
_HUB_ID = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?", re.ASCII)
_HUB_PAGE = re.compile(r"(?P<id>[\w.-]+/[\w.-]+?)(?:/tree/(?P<revision>[\w./-]+?))?/?", re.ASCII)

# What a hub says of a file and of a model.
_TAG = re.compile(r"[\w-]{8,128}")
_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")

# The same weights for others.
_FOREIGN_FOLDERS = {"onnx", "openvino", "coreml", "original", "runs"}
_FOREIGN_FILES = (
    *(".onnx", ".onnx_data", ".h5", ".msgpack", ".ot", ".gguf", ".tflite", ".mlmodel", ".pb", ".zip"),
    *(".html", ".htm"),
)
_SETTINGS = {".json", ".txt", ".model", ".spm", ".tiktoken", ".jinja"}
_WEIGHTS = re.compile(r"(?:model|pytorch_model|adapter_model)(?:-\d+-of-\d+)?\.(?P<kind>safetensors|bin)")
# What only a trainer's own checkpoint has, of which any file may be needed.
_TRAINERS = re.compile(
    r"(?:^|/)(?:global_step\d+/|mp_rank_|latest$|latest_checkpointed_iteration\.txt$|\.metadata$|[^/]*\.distcp$)"
)

# What stores say of a file, of which one changes with its bytes: S3, Google's, a disk, memory, web servers.
_STATES = (
    *("ETag", "etag", "LastModified", "md5Hash", "updated", "mtime", "created"),
    *("Last-Modified", "Content-MD5", "Digest"),
)

_WEB = ("http", "https")

# Fetched last, so that a copy that has it is whole.
_LAST = "config.json"


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """Where a checkpoint is now.

    Attributes:
        path: Folder or file.
        address: Where it was fetched from, with the commit if there are such; empty where it was here.
    """

    path: Path
    address: str = ""


def fetch_all(words: Sequence[str], tell: Callable[[str], None]) -> list[Fetched]:
    """Return where each of `words` is: a path, `OWNER/NAME[@REVISION]` of the hub, or a URL that fsspec opens.

    A path that is there is never looked for elsewhere.

    Raises:
        CheckpointError: It is nowhere, or cannot be fetched.
    """
    return [_fetch(word, tell) for word in words]


def join_addresses(fetched: Iterable[Fetched]) -> str:
    """Return where they were fetched from; empty where all were here."""
    return ", ".join(each.address for each in fetched if each.address)


def choose_files(names: Iterable[str]) -> list[str]:
    """Return those of a model's files that the readers look at: safetensors where there are both, and no other formats.

    Args:
        names: Paths below the model's folder, with slashes.
    """
    kept = [name for name in names if not _is_foreign(PurePosixPath(name))]
    weights = {name: match["kind"] for name in kept if (match := _WEIGHTS.fullmatch(PurePosixPath(name).name))}
    if not weights or any(_TRAINERS.search(name) for name in kept):
        return sorted(kept)
    safe = {PurePosixPath(name).parent for name, kind in weights.items() if kind == "safetensors"}
    chosen = []
    for name in kept:
        path = PurePosixPath(name)
        kind = weights.get(name) or ("bin" if name.endswith(".bin.index.json") else "")
        if (kind or path.suffix in _SETTINGS) and not (kind == "bin" and path.parent in safe):
            chosen.append(name)
    return sorted(chosen)


def _is_foreign(path: PurePosixPath) -> bool:
    return (
        path.name.endswith(_FOREIGN_FILES)
        or path.name.startswith(".git")
        or any(part in _FOREIGN_FOLDERS or part.startswith(".") for part in path.parts[:-1])
    )


def _fetch(word: str, tell: Callable[[str], None]) -> Fetched:
    if not word:
        # To Python the working folder, and a variable of a shell that is not set to whoever typed it.
        raise CheckpointError(
            "no checkpoint is named", expected="a folder or an address", got="an empty word", remedy="name it"
        )
    id_ = _HUB_ID.fullmatch(word)
    if os.path.lexists(word):
        if id_:
            tell(f"{word} is the folder here, not the model of that name on the hub")
        return Fetched(path=Path(word))
    if id_:
        return _fetch_model(id_["id"], id_["revision"] or "main", tell)
    if "://" not in word:
        return Fetched(path=Path(word))
    page = _HUB_PAGE.fullmatch(word.removeprefix(_find_endpoint() + "/"))
    if page:
        return _fetch_model(page["id"], page["revision"] or "main", tell)
    return _fetch_folder(word, tell)


def _find_endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def _fetch_model(name: str, revision: str, tell: Callable[[str], None]) -> Fetched:
    from huggingface_hub import HfApi, get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    what = f"there is no folder {name} here, and no model of that name can be fetched from {_find_endpoint()}"
    try:
        info = HfApi().model_info(name, revision=revision)
        commit = str(info.sha)
        # The library takes it for the name of a folder.
        if not _COMMIT.fullmatch(commit):
            raise _distrust(f"{name}@{revision}", "40 or 64 hexadecimal digits as its commit", commit)
        names = choose_files(each.rfilename for each in info.siblings or ())
        tell(f"{name}@{commit}: {len(names)} of {len(info.siblings or ())} files from {_find_endpoint()}")
        names.sort(key=lambda each: each == _LAST)
        for each in names:
            # The library takes it for the name of a file.
            tag = get_hf_file_metadata(hf_hub_url(name, each, revision=commit)).etag
            if not _TAG.fullmatch(tag or ""):
                raise _distrust(f"{name}/{each}", "a hash as its tag", tag)
            # The last one by the name of its revision, which is how it is found again without a connection.
            path = hf_hub_download(name, each, revision=revision if each is names[-1] else commit)
    except GatedRepoError as exc:
        raise CheckpointError(
            what, expected="leave to read it", got="none", remedy="ask for it on the model's page, then `hf auth login`"
        ) from exc
    except RevisionNotFoundError as exc:
        raise CheckpointError(
            what, expected=f"a branch, tag or commit {revision}", got="none", remedy="correct what follows the @"
        ) from exc
    except RepositoryNotFoundError as exc:
        raise CheckpointError(
            what,
            expected="a folder, or OWNER/NAME of a model that may be read",
            got="neither",
            remedy="correct it, or `hf auth login` if the model is private",
        ) from exc
    except CheckpointError:
        raise
    # Of several libraries, depending on which of them was asked first: there is no connection, or it broke.
    except Exception as exc:
        found = _find_cached(name, revision)
        if found is None:
            raise CheckpointError(
                what,
                expected="a connection, or a copy that was fetched before",
                got=f"'{exc}'",
                remedy=f"`hf download {name} --revision {revision} --local-dir FOLDER` where there is a connection, "
                "and name the FOLDER",
            ) from exc
        tell(f"{name}@{found.name}: the copy that was fetched before, for {_find_endpoint()} cannot be reached")
        return Fetched(path=found, address=f"{name}@{found.name}")
    if not names:
        raise CheckpointError(what, expected="files of a checkpoint", got="none", remedy="name another model")
    folder = Path(path).parents[len(PurePosixPath(names[-1]).parts) - 1]
    if folder.name != commit:
        raise CheckpointError(
            f"{name}@{revision} was changed while it was fetched", expected=commit, got=folder.name, remedy="try again"
        )
    return Fetched(path=folder, address=f"{name}@{commit}")


def _distrust(what: str, expected: str, got: str | None) -> CheckpointError:
    return CheckpointError(f"{what} is not fetched", expected=expected, got=repr(got), remedy="trust no such hub")


def _find_cached(name: str, revision: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(name, _LAST, revision=revision)
    return Path(path).parent if isinstance(path, str) else None


def _fetch_folder(url: str, tell: Callable[[str], None]) -> Fetched:
    # What lets somebody in is not to be written down.
    address = re.sub(r"//[^/@]*@", "//", url).split("?", 1)[0].rstrip("/")
    try:
        return _copy(url, address, tell)
    except CheckpointError:
        raise
    except ImportError as exc:
        raise CheckpointError(
            f"{address} cannot be fetched",
            expected="what opens such addresses",
            got=f"'{exc}'",
            remedy="install that, or fetch the folder with the store's own tool and name it",
        ) from exc
    # Each store has errors of its own.
    except Exception as exc:
        told = _explain(exc, address) or CheckpointError(
            f"{address} cannot be fetched",
            expected="a folder that may be read",
            got=f"'{' '.join(str(exc).split()) or type(exc).__name__}'",
            remedy="correct the address or what lets you in, or fetch it with the store's own tool and name the folder",
        )
        raise told from exc


def _explain(exc: Exception, address: str) -> CheckpointError | None:
    if not _is_web(address):
        return None
    from .http_failures import explain

    return explain(exc, address)


def _is_web(address: str) -> bool:
    return address.partition("://")[0] in _WEB


def _copy(url: str, address: str, tell: Callable[[str], None]) -> Fetched:
    """Return a copy of what is at `url`; one that was made of the very same files is taken again."""
    store, root, found = _list_web(url, address) if _is_web(address) else _list_store(url)
    # Stores have no folders: their pages in the browser write an empty object with a slash at its end for one.
    listed = (path for path in found if path == root or ("?" not in path and not path.endswith("/")))
    places = {_name_below(path, root): path for path in listed}
    names = choose_files(places)
    if not names:
        raise _refuse_empty(address)
    states = [_read_state(found[places[name]]) for name in names]
    digest = hashlib.sha256(repr((address, sorted(zip(names, states, strict=True)))).encode()).hexdigest()
    folder = CACHE / "fetched" / digest[:32]
    if not all(states):
        # Nothing tells whether the copy of yesterday is what is there today.
        shutil.rmtree(folder, ignore_errors=True)
    if folder.is_dir():
        tell(f"{address}: {len(names)} of {len(places)} files, the copy that was fetched before")
    else:
        tell(f"{address}: {len(names)} of {len(places)} files")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="staging-", dir=folder.parent) as staging:
            for name in names:
                path = Path(staging, "whole", name)
                path.parent.mkdir(parents=True, exist_ok=True)
                store.get_file(places[name], str(path))
            # Whoever was faster has the same.
            if not folder.is_dir():
                Path(staging, "whole").replace(folder)
    return Fetched(path=folder / names[0] if root in found else folder, address=address)


def _list_store(url: str) -> tuple[Any, str, dict[str, dict[str, Any]]]:
    """Return the store, the path in it, and each file there → what the store says of it."""
    import fsspec

    store, root = fsspec.core.url_to_fs(url)
    return store, root, store.find(root, detail=True)


def _list_web(url: str, address: str) -> tuple[Any, str, dict[str, dict[str, Any]]]:
    """Return the same of a web server, whose lists say nothing of a file: each is asked for."""
    import fsspec

    from .http_failures import build_session, refuse_page

    given = fsspec.config.conf.get("http", {}).get("client_kwargs", {})
    store, root = fsspec.core.url_to_fs(url, client_kwargs=build_session(given))
    # Otherwise what fails there is a folder without files.
    found = store.find(root, detail=True, on_error="raise")
    places = [path for path in found if path == root or choose_files([_name_below(path, root)])]
    states = {path: store.info(path) for path in places}
    if root in states and states[root].get("mimetype") == "text/html":
        raise refuse_page(address)
    return store, root, found | states


def _refuse_empty(address: str) -> CheckpointError:
    if _is_web(address):
        from .http_failures import refuse_page

        return refuse_page(address)
    return CheckpointError(
        f"there is nothing at {address}", expected="a folder with a checkpoint", got="no file", remedy="correct it"
    )


def _name_below(path: str, root: str) -> str:
    """Return the path of a file below the folder, or the name of the one file that is meant.

    Raises:
        CheckpointError: It leads out of the folder.
    """
    # What follows a question mark is not of a file's name; a store's own addresses of one file are signed there.
    own = PurePosixPath(path.split("?", 1)[0]).name
    below = PurePosixPath(own if path == root else path.removeprefix(root).lstrip("/"))
    if not below.parts or ".." in below.parts:
        raise CheckpointError(f"{path} is not a file below {root}", expected="names inside of it", got=str(below))
    return below.as_posix()


def _read_state(info: dict[str, Any]) -> str:
    """Return what changes when a file does, as its store tells it; empty where it does not."""
    told = {key: str(info[key]) for key in _STATES if info.get(key)}
    return f"{info.get('size')} {told}" if told else ""
