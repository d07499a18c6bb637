"""What is known of a published version, read from the documents beside it; and how two versions differ."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import list_some
from ..tasks.comparison import is_judged
from .contents import find_active_version
from .version import Version

_MISSING = "-"

# File of the preprocess step: what makes ids of texts.
_TOKENIZER_FILE = "tokenizer.json"

_FP32 = "fp32"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a version says of itself; empty where an older modelyard did not record it.

    Attributes:
        name: The public model.
        version: The number.
        active: Whether servers that follow the repository serve it.
        published: Date and time, ISO 8601, UTC.
        checkpoint: The folder that it was exported from, or the function that built the module.
        kind: What that is, in words.
        task: What it is served as.
        precision: Precision of the served file.
        engine: What runs it.
        target: The Triton release.
        worst: Error → the worst of the cases that were judged; errors that have a bound come first.
        cases: How many were judged.
        size_bytes: Bytes of its files, those included that it shares with another version.
    """

    name: str
    version: int
    active: bool
    published: str
    checkpoint: str
    kind: str
    task: str
    precision: str
    engine: str
    target: str
    worst: Mapping[str, float]
    cases: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One thing in which two versions differ.

    Attributes:
        section: `weights`, `tokenizer`, `options`, `tools` or `quality`.
        what: The file, option, tool or figure.
        before: Of the one version, `-` where it has none.
        after: Of the other.
    """

    section: str
    what: str
    before: str
    after: str


def read_facts(version: Version) -> Facts:
    """Return what a version says of itself.

    Raises:
        RepositoryError: A configuration cannot be read.
    """
    publication, report, lock = version.read_publication(), version.read_report(), version.read_lock()
    options = lock.get("options", {})
    return Facts(
        name=version.name,
        version=version.number,
        active=find_active_version(version.repository, version.name) == version.number,
        published=str(publication.get("published", "")),
        checkpoint=str(publication.get("checkpoint", "")),
        kind=str(publication.get("kind", "")),
        task=str(publication.get("task") or options.get("task") or ""),
        precision=str(options.get("precision") or report.get("precision", {}).get("precision") or _FP32),
        engine=find_engine(report, lock),
        target=str(report.get("target") or lock.get("target", {}).get("release", "")),
        worst=_find_worst(report),
        cases=len(list_judged(report)),
        size_bytes=sum(path.stat().st_size for path in version.list_files()),
    )


def find_engine(report: Mapping[str, Any], lock: Mapping[str, Any]) -> str:
    """Return the engine that was chosen by measurement, else the one that was asked for, empty where none was."""
    return str(report.get("engines", {}).get("chosen") or lock.get("options", {}).get("engine") or "")


def list_judged(report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the cases of a proof that were judged, which `run` counts: others say nothing of the version."""
    return [case for case in report.get("cases", []) if is_judged(case, report.get("tolerances", {}))]


def compare(one: Version, other: Version) -> list[Difference]:
    """Return what differs between two versions of a model: what they were made of and with, and how well they do.

    Raises:
        RepositoryError: A configuration cannot be read.
    """
    locks = one.read_lock(), other.read_lock()
    sources = [_flatten_sources(lock) for lock in locks]
    artefacts = [dict(lock.get("artefacts", {})) for lock in locks]
    for files in artefacts:
        files.pop(_TOKENIZER_FILE, None)
    tools = [_read_tools(lock) for lock in locks]
    options = [flatten_options(lock.get("options", {})) for lock in locks]
    figures = [_read_figures(read_facts(version), version) for version in (one, other)]
    return [
        *_differ("weights", *(_shorten_digests(found) for found in sources)),
        *_differ("weights", *(_shorten_digests(found) for found in artefacts)),
        *_differ("tokenizer", *(_read_tokenizer(version) for version in (one, other))),
        *_differ("options", *options),
        *_differ("tools", *tools),
        *_differ("quality", *figures),
    ]


def flatten_options(options: Mapping[str, Any]) -> dict[str, str]:
    """Return option → what was given for it, where anything was; those within others by both names."""
    given: dict[str, str] = {}
    for key, value in options.items():
        if isinstance(value, Mapping):
            given |= {f"{key} {inner}": text for inner, text in flatten_options(value).items()}
        elif value not in (None, [], ""):
            given[key] = _show(value)
    return given


def _find_worst(report: Mapping[str, Any]) -> dict[str, float]:
    """Return error → the worst in any case that was judged; those first that have a bound, others in each precision."""
    cases = list_judged(report)
    measured = (key for case in cases for key in case if key.startswith(("min_", "max_")))
    # Of a cosine the smallest is the worst.
    return {
        key: (min if key.startswith("min_") else max)(case[key] for case in cases if key in case)
        for key in dict.fromkeys([*report.get("tolerances", {}), *measured])
        if any(key in case for case in cases)
    }


def _differ(section: str, before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[Difference]:
    for what in sorted({*before, *after}):
        pair = before.get(what, _MISSING), after.get(what, _MISSING)
        if pair[0] != pair[1]:
            yield Difference(section=section, what=what, before=pair[0], after=pair[1])


def _flatten_sources(lock: Mapping[str, Any]) -> dict[str, str]:
    sources = lock.get("sources", {}).items()
    return {f"{what}/{file}": digest for what, source in sources for file, digest in source["files"].items()}


def _shorten_digests(files: Mapping[str, str]) -> dict[str, str]:
    return {file: digest[:12] for file, digest in files.items()}


def _read_tools(lock: Mapping[str, Any]) -> dict[str, str]:
    target = {f"target {key}": _show(value) for key, value in lock.get("target", {}).items()}
    return {**lock.get("versions", {}), **target}


def _read_tokenizer(version: Version) -> dict[str, str]:
    """Return what decides which ids a text becomes, in a few words each."""
    path = next((path for path in version.list_files() if path.name == _TOKENIZER_FILE), None)
    if path is None:
        return {}
    digests = {file.name: digest for file, digest in version.read_sums().items()}
    file = {"file": digests.get(_TOKENIZER_FILE, _MISSING)[:12]}
    # What is damaged is told by the verb that is asked for damage.
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {**file, **_describe_tokenizer(json.loads(path.read_text(encoding="utf-8")))}
    return file


def _describe_tokenizer(content: Mapping[str, Any]) -> dict[str, str]:
    added = [token["content"] for token in content.get("added_tokens") or []]
    truncation = content.get("truncation") or {}
    return {
        "kind": str(content.get("model", {}).get("type", _MISSING)),
        "vocabulary": f"{len(content.get('model', {}).get('vocab', []))} entries",
        "added tokens": f"{len(added)}: {list_some(added)}" if added else "none",
        "longest text": f"{truncation.get('max_length', _MISSING)} tokens",
    }


def _read_figures(facts: Facts, version: Version) -> dict[str, str]:
    precision = version.read_report().get("precision", {})
    quality = {f"{facts.precision} {key}": _show(precision[key]) for key in ("quality",) if key in precision}
    worst = {f"worst {key.split('_', 1)[1].replace('_', ' ')}": f"{value:.2g}" for key, value in facts.worst.items()}
    return {**worst, **quality, "cases": str(facts.cases), "size": f"{facts.size_bytes / 1e6:.1f} MB"}


def _show(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
