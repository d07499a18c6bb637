"""The verb `tune`: how a published model is best served on this machine, measured."""

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SettingsError
from ..locations import CACHE, name_command
from ..option_kinds import PATH, PATHS
from ..options_file import OPTIONS_FILE, has_table
from .verb import Verbs, add_repository, add_verb, align, answer, say

if TYPE_CHECKING:
    from tritonclient.grpc import model_config_pb2 as pb

    from ..repository.version import Version
    from ..tuning.search import Tried
    from ..tuning.ways import Way

_EXAMPLES = (
    "tickets --p99-ms 50",
    "tickets --p99-ms 50 --connections 64 --protocol grpc --minutes 5",
    "tickets --p99-ms 50 --apply",
    "tickets --p99-ms 50 --write && modelyard run ./checkpoint --name tickets",
    "tickets --p99-ms 50 --json",
)

_MORE = f"""copies of the graph, threads of each, and how long it waits for requests to join are tried on a server of
its own, under real text: all of them a little, the better ones again and longer. No answer changes. What was
measured is kept, so that the same command goes on where it was ended. --apply publishes the same files, with their
proof, as a version that is served in the best way, which running servers follow; --write puts it into {OPTIONS_FILE},
for exports to come."""


def add_parser(verbs: "Verbs[argparse.ArgumentParser]") -> None:
    """Add the verb to the command line."""
    parser = add_verb(
        verbs,
        "tune",
        run,
        help="measure how a published model is best served on this machine",
        description="Find how many copies and threads, and which delay, answer the most requests within a limit.",
        examples=_EXAMPLES,
        succeeded="found",
        more=_MORE,
        codes="1 refused, or nothing holds the limit (one sentence on stderr), 2 wrong usage, 3 it cannot be served",
    )
    parser.add_argument("name", metavar="NAME", help="name that clients use")
    parser.add_argument("version", metavar="N", type=int, nargs="?", help="version (default: the active one)")
    parser.add_argument("--p99-ms", type=_positive, required=True, metavar="MS", help="limit of 99 requests in 100")
    parser.add_argument("--connections", type=_count, default=16, help="requests in flight (default: %(default)s)")
    parser.add_argument("--protocol", choices=("http", "grpc"), default="http", help="default: %(default)s")
    parser.add_argument(
        "--minutes", type=_positive, default=10.0, help="after which the best so far is taken (default: 10)"
    )
    parser.add_argument("--fresh", action="store_true", help="measure anew what was measured before")
    parser.add_argument(
        "--apply", action="store_true", help="serve it so from now on: the same files, as a new version"
    )
    parser.add_argument("--write", action="store_true", help=f"put the best into {OPTIONS_FILE} of this folder")
    add_repository(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the verb. Raises what its parts raise, and SettingsError where nothing holds the limit."""
    from ..repository.contents import check_published, find_active_version
    from ..repository.version import find_version
    from ..tuning import trial
    from ..tuning.journal import Journal
    from ..tuning.search import Figures, plan_rounds, search
    from ..tuning.ways import Way, find_graph, list_ways, write_way

    check_published(arguments.repository, arguments.name)
    number = arguments.version or find_active_version(arguments.repository, arguments.name)
    version = find_version(arguments.repository, arguments.name, number)
    configs = version.read_configs()
    _check_texts(version, [tensor.name for tensor in configs[version.name].input])
    if arguments.write:
        _check_writable(Path(OPTIONS_FILE), version.name)
    graph = find_graph(configs, version.name)
    ways = list_ways(configs[graph])
    load = trial.Load(connections=arguments.connections, protocol=arguments.protocol)
    path = CACHE / "tune" / f"{version.name}-{number}-{_identify(version)}-{load.protocol}-{load.connections}.jsonl"
    if arguments.fresh:
        path.unlink(missing_ok=True)
    journal = Journal(path)
    deadline = time.monotonic() + 60 * arguments.minutes
    say(
        f"{len(ways)} ways to serve version {number} of {version.name}, {load.connections} requests in flight over "
        f"{load.protocol}; {arguments.minutes:g} minutes at most"
        + (f"; {len(journal)} measurements of an earlier search are taken over" if len(journal) else "")
    )
    rounds = plan_rounds(len(ways))

    def measure(way: Way, length: int, turn: int) -> Figures:
        changed = {**configs, graph: write_way(configs[graph], way)}
        found = journal.measure((way, length, turn), lambda: trial.measure(version, changed, load, length))
        say(f"  {_describe(way)}: {found.requests_per_s:.1f} requests/s, p99 {found.p99_ms:.1f} ms")
        return found

    say(f"measured in rounds of {', '.join(map(str, rounds))}, longer each time")
    tried = search(ways, measure, p99_ms=arguments.p99_ms, has_time=lambda: time.monotonic() < deadline)
    if tried[0].rounds < len(rounds):
        say("time was up before the last round: the same command with more --minutes goes on from here")
    best = tried[0].way
    changed = {**configs, graph: write_way(configs[graph], best)}
    return _tell(arguments, version, changed, ways[0], tried)


def _tell(
    arguments: argparse.Namespace,
    version: "Version",
    changed: "Mapping[str, pb.ModelConfig]",
    now: "Way",
    tried: "Sequence[Tried[Way]]",
) -> int:
    best, applied = tried[0], None
    if best.figures.p99_ms > arguments.p99_ms:
        nearest = f"{best.figures.p99_ms:.1f} ms with {_describe(best.way)}"
        raise SettingsError(
            f"no way to serve {version.name} answers {arguments.connections} requests at a time as fast as was asked",
            expected=f"99 in 100 within {arguments.p99_ms:g} ms",
            got=nearest,
            remedy="pass fewer --connections or a higher --p99-ms, or export it for a faster --engine or --precision",
        )
    options = best.way.to_options()
    before = next((each.figures for each in tried if each.way == now), None)
    table = [f"[models.{version.name}]", *(f"{name} = {value}" for name, value in options.items())]
    lines = [*_render_table(tried, now), ""]
    if best.way == now:
        lines.append("it is served in the best way that was found; nothing is to be changed")
    else:
        gain = f", {best.figures.requests_per_s / before.requests_per_s:.2f} times what it is now" if before else ""
        lines += [f"best: {_describe(best.way)}{gain}", *table]
        if arguments.apply:
            from ..repository.serving_change import serve_otherwise

            # What says no more than there is without it is left out, as an export would leave it out.
            serving = {name: options.get(name) for name in asdict(best.way)}
            applied = serve_otherwise(version, changed, serving)
            lines.append(f"published as version {applied}, the same files with their proof, and made the active one")
        if arguments.write:
            _write(table)
            lines.append(f"written to {OPTIONS_FILE}")
        lines += _say_next(arguments, version)
    content: dict[str, Any] = {
        "name": version.name,
        "version": version.number,
        "p99_ms": arguments.p99_ms,
        "connections": arguments.connections,
        "protocol": arguments.protocol,
        "best": options,
        "is_served_so": best.way == now,
        "applied": applied,
        "tried": [asdict(each) for each in tried],
    }
    is_published = f"version {applied} of {version.name} is published" if applied else ""
    answer(arguments, content, lines, is_published)
    return 0


def _write(table: list[str]) -> None:
    """Add a table to the file of options, which `_check_writable` has let pass."""
    path = Path(OPTIONS_FILE)
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    new = path.with_name(f"{path.name}.new")
    new.write_text((before.rstrip("\n") + "\n\n" if before.strip() else "") + "\n".join(table) + "\n", encoding="utf-8")
    new.replace(path)


def _say_next(arguments: argparse.Namespace, version: "Version") -> list[str]:
    from ..options import list_options, spell_options
    from ..tuning.ways import Way

    if arguments.apply:
        later = "" if arguments.write else f"; for exports to come put that into {OPTIONS_FILE}, or pass --write"
        shown = name_command("versions", "list", version.name, "--repository", arguments.repository)
        return [f"Next: {shown}; running servers follow{later}"]
    checkpoint = str(version.read_publication().get("checkpoint", "CHECKPOINT"))
    given = spell_options(version.read_lock().get("options", {}), without=[field.name for field in fields(Way)])
    again = name_command("run", checkpoint, "--name", version.name, "--repository", arguments.repository, *given)
    paths = [option.flag for option in list_options() if option.kind in (PATH, PATHS) and option.flag in given]
    also = [f"of {', '.join(paths)} the last part of the path is recorded alone: complete it"] if paths else []
    if arguments.write:
        return [f"Next: {again}", *also]
    return [f"Next: pass --apply to serve it so, or put that into {OPTIONS_FILE} and export it again: {again}", *also]


def _check_writable(path: Path, name: str) -> None:
    """Refuse, before anything is measured, a file that has a table of this model: it is its author's to change.

    Raises:
        SettingsError: It has, or cannot be read.
    """
    if path.exists() and has_table(path, name):
        raise SettingsError(
            f"{path} has a table of {name} already",
            expected="none, for --write adds one",
            got=f"[models.{name}]",
            remedy="leave out --write, and change the lines that are printed by hand",
        )


def _check_texts(version: "Version", inputs: list[str]) -> None:
    if inputs not in (["TEXT"], ["TEXT", "TEXT_PAIR"]):
        raise SettingsError(
            f"{version.name} cannot be tuned",
            expected="a model that takes TEXT, which it can be asked with",
            got=f"the inputs {', '.join(inputs)}",
            remedy="measure it with perf_analyzer, and choose what `modelyard run --help` offers by that",
        )


def _render_table(tried: "Sequence[Tried[Way]]", now: "Way") -> list[str]:
    heads = ("instances", "threads", "delay us", "requests/s", "least", "most", "p50 ms", "p99 ms", "round", "")
    rows = [
        (
            str(each.way.instances),
            "" if each.way.threads is None else str(each.way.threads),
            "" if each.way.max_queue_delay_microseconds is None else str(each.way.max_queue_delay_microseconds),
            *(f"{value:.1f}" for value in (each.figures.requests_per_s, each.least, each.most)),
            *(f"{value:.1f}" for value in (each.figures.p50_ms, each.figures.p99_ms)),
            str(each.rounds),
            "as it is served now" if each.way == now else "",
        )
        for each in tried
    ]
    return align([heads, *rows])


def _describe(way: "Way") -> str:
    return ", ".join(f"{name} {value}" for name, value in way.to_options().items())


def _identify(version: "Version") -> str:
    """Return what tells the files of a version from those of others: its sums' digest."""
    import hashlib

    sums = sorted((str(path), digest) for path, digest in version.read_sums().items())
    return hashlib.sha256(repr(sums).encode()).hexdigest()[:12]


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected more than 0, got {text}")
    return value


def _count(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 1024:
        raise argparse.ArgumentTypeError(f"expected 1 to 1024, got {text}")
    return value
