"""The verb `versions`: what is published, what a version is, and how two of them differ."""

import argparse
from dataclasses import asdict
from pathlib import Path

from ..errors import RepositoryError
from ..locations import name_command
from ..repository.contents import check_published, find_active_version, list_models, list_versions
from ..repository.facts import Difference, Facts, compare, flatten_options, read_facts
from ..repository.version import Version, find_version
from .verb import Run, Verbs, add_repository, add_verb, align, answer

_EXAMPLES = (
    "list --repository /srv/models",
    "list tickets --repository /srv/models --json",
    "show tickets 3 --repository /srv/models",
    "diff tickets 2 3 --repository /srv/models",
)

_SECTIONS = ("weights", "tokenizer", "options", "tools", "quality")


def add_parser(verbs: "Verbs[argparse.ArgumentParser]") -> None:
    """Add the verb to the command line."""
    parser = add_verb(
        verbs,
        "versions",
        run_list,
        help="list published versions, show one, or tell how two differ",
        description="List published versions, show one, or tell how two differ. Reads documents only, no weights.",
        examples=_EXAMPLES,
        succeeded="told",
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    listed = _add_action(actions, "list", run_list, "every version of every model, or of one", _EXAMPLES[:2])
    listed.add_argument("name", metavar="NAME", nargs="?", help="name that clients use (default: every model)")
    shown = _add_action(actions, "show", run_show, "everything that is known of a version", _EXAMPLES[2:3])
    shown.add_argument("name", metavar="NAME", help="name that clients use")
    shown.add_argument("version", metavar="N", type=int, nargs="?", help="version (default: the active one)")
    differed = _add_action(actions, "diff", run_diff, "what changed from one version to another", _EXAMPLES[3:])
    differed.add_argument("name", metavar="NAME", help="name that clients use")
    differed.add_argument("version", metavar="A", type=int, help="version")
    differed.add_argument("other", metavar="B", type=int, help="version that it is compared with")
    for each in (listed, shown, differed):
        add_repository(each)


def _add_action(
    actions: "Verbs[argparse.ArgumentParser]", name: str, run: Run, text: str, examples: tuple[str, ...]
) -> argparse.ArgumentParser:
    lines = ["examples:", *(f"  {name_command('versions')} {example}" for example in examples)]
    parser: argparse.ArgumentParser = actions.add_parser(
        name,
        help=text,
        description=f"Tell {text}.",
        epilog="\n".join(lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def run_list(arguments: argparse.Namespace) -> int:
    """Write a line on each version. Raises `RepositoryError` where there is no such repository or model."""
    if arguments.name:
        check_published(arguments.repository, arguments.name)
    names = [arguments.name] if arguments.name else list_models(arguments.repository)
    found = [
        read_facts(Version(repository=arguments.repository, name=name, number=number))
        for name in names
        for number in list_versions(arguments.repository / name)
    ]
    rows: list[tuple[str, ...]] = [
        ("model", "version", "", "published", "checkpoint", "task", "precision", "target", "worst error", "size"),
        *map(_build_row, found),
    ]
    lines = align(rows) if found else [f"{arguments.repository} holds no version of modelyard's"]
    answer(arguments, {"versions": [asdict(facts) for facts in found]}, lines)
    return 0


def run_show(arguments: argparse.Namespace) -> int:
    """Write what is known of a version. Raises `RepositoryError` where there is none of that number."""
    version = _find(arguments.repository, arguments.name, arguments.version)
    facts, lock, report = read_facts(version), version.read_lock(), version.read_report()
    files = {path.relative_to(arguments.repository).as_posix(): path.stat().st_size for path in version.list_files()}
    rows = {
        "version": f"{facts.version} of {facts.name}, {'active' if facts.active else 'not active'}",
        "published": facts.published,
        "checkpoint": ", ".join(text for text in (facts.checkpoint, facts.kind) if text),
        "task": facts.task,
        "precision": facts.precision,
        "engine": facts.engine,
        "target": facts.target,
        "proof": f"{facts.cases} cases, at worst {_describe_worst(facts)}",
        "report": str(version.folder / "verification.html"),
        **{f"made with {tool}": str(number) for tool, number in lock.get("versions", {}).items()},
        **{f"option {key}": value for key, value in flatten_options(lock.get("options", {})).items()},
        **{file: f"{size / 1e6:.3f} MB" for file, size in files.items()},
    }
    content = asdict(facts) | {"files": files, "lock": lock, "report": report}
    answer(arguments, content, align([(label, text) for label, text in rows.items() if text]))
    return 0


def run_diff(arguments: argparse.Namespace) -> int:
    """Write how two versions differ. Raises `RepositoryError` where one of them is not there."""
    one, other = (
        _find(arguments.repository, arguments.name, number) for number in (arguments.version, arguments.other)
    )
    found = compare(one, other)
    rows = [row for section in _SECTIONS for row in _build_section(section, found)]
    lines = [f"{arguments.name}: from version {one.number} to version {other.number}", *align(rows)]
    sections = {section: [asdict(each) for each in found if each.section == section] for section in _SECTIONS}
    answer(arguments, {"name": arguments.name, "from": one.number, "to": other.number, "differences": sections}, lines)
    return 0


def _find(repository: Path, name: str, number: int | None) -> Version:
    check_published(repository, name)
    chosen = find_active_version(repository, name) if number is None else number
    if number is None and not chosen:
        raise RepositoryError(
            f"{name} in {repository} has no active version",
            expected="one, or a number",
            got="neither",
            remedy="see `versions list`",
        )
    return find_version(repository, name, chosen)


def _build_row(facts: Facts) -> tuple[str, ...]:
    return (
        facts.name,
        str(facts.version),
        "active" if facts.active else "",
        facts.published[:16].replace("T", " ") or "-",
        Path(facts.checkpoint).name or "-",
        facts.task or "-",
        facts.precision,
        facts.target or "-",
        _describe_worst(facts),
        f"{facts.size_bytes / 1e6:.1f} MB",
    )


def _describe_worst(facts: Facts) -> str:
    for name, value in facts.worst.items():
        # int8 is judged by agreement alone, of which the least is the worst.
        return f"{name[4:].replace('_', ' ')} {value:.7g}" if name.startswith("min_") else f"{value:.1e}"
    return "-"


def _build_section(section: str, found: list[Difference]) -> list[tuple[str, str, str]]:
    rows = [(each.what, f"{each.before} → {each.after}") for each in found if each.section == section]
    first, *rest = rows or [("the same", "")]
    return [(section, *first), *(("", *row) for row in rest)]
