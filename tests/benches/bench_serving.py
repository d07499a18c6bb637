"""Ours beside other servers, on real text, in one run: `make bench`.

    python -m benches.bench_serving [--quick] [--ours NAMES] [--peers NAMES]

Every round starts, measures and stops each contender in an order of its own. All are asked the same texts in the same
order, by clients that wait for their answers. A ratio is taken within a round, between neighbours in time; what is told
is the median of the rounds, with the least and the most. Clients and servers share the cores.

Ours are exported, and peers installed into `.cache/bench/NAME`, before the first round; that takes minutes the first
time, and is not part of the limit that is printed.
"""

import argparse
import json
import platform
import random
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benches.serving import measure
from benches.serving.contenders import CORES, OURS, PEERS, REFERENCE, Contender, Limit
from benches.serving.summary import render_markdown, render_page, summarise
from harness import CHECKOUT

from client.bench import read_corpus

RESULTS = CHECKOUT / ".cache" / "bench" / "results"

_TEXTS = 400

# What starting, checking and stopping a server takes about.
_START_S = 8.0
_OFFLINE_START_S = 3.0

# How much longer than planned it may take before what is left is given up.
_SLACK = 1.5
_QUICK_LIMIT_S = 170.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured, how often and how long."""

    contenders: tuple[Contender, ...]
    levels: tuple[int, ...]
    rounds: int
    seconds: float

    @property
    def planned_s(self) -> float:
        """How long it takes where every server starts as fast as most do."""
        limits = sum(isinstance(contender, Limit) for contender in self.contenders)
        servers = len(self.contenders) - limits
        one_round = servers * (
            _START_S + measure.FIRST_WARM_S + len(self.levels) * (measure.WARM_S + self.seconds + 0.7)
        )
        return self.rounds * (one_round + limits * (_OFFLINE_START_S + self.seconds))


@dataclass
class Findings:
    """All windows of a contender, round by round, and why there are not more."""

    name: str
    title: str
    kind: str
    limit: str = ""
    rounds: list[list[measure.Window]] = field(default_factory=list)
    starts: list[dict[str, float]] = field(default_factory=list)
    failure: str = ""


def main() -> int:
    arguments = build_parser().parse_args()
    plan = build_plan(arguments)
    _say(f"preparing {len(plan.contenders)} contenders (exported models and environments are kept in .cache/bench)")
    findings = {each.name: _describe(each) for each in plan.contenders}
    prepare(plan, findings, again=arguments.again)
    able = [each for each in plan.contenders if not findings[each.name].failure]
    limit_s = min(_SLACK * plan.planned_s, _QUICK_LIMIT_S if arguments.quick else float("inf"))
    _say(
        f"{len(able)} contenders, {plan.rounds} rounds, {plan.seconds:g} s at each of {list(plan.levels)} connections: "
        f"about {plan.planned_s / 60:.1f} minutes, at most {limit_s / 60:.1f}"
    )
    texts = measure.read_vectors(random.Random(0).sample(read_corpus(), _TEXTS))
    deadline = time.monotonic() + limit_s
    done = run_rounds(plan, able, findings, texts, deadline)
    result = {
        "machine": describe_machine(),
        "plan": {
            "rounds": plan.rounds,
            "rounds_done": done,
            "levels": plan.levels,
            "seconds": plan.seconds,
            "texts": len(texts.texts),
            "words_mean": sum(len(text.split()) for text in texts.texts) / len(texts.texts),
        },
        "contenders": [asdict(each) for each in findings.values()],
    }
    summary = summarise(result)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "bench.json").write_text(json.dumps({**result, "summary": summary}, indent=1) + "\n")
    (arguments.out / "bench.md").write_text(text := render_markdown(result, summary))
    (arguments.out / "bench.html").write_text(render_page(result, summary))
    sys.stdout.write(text)
    _say(f"written: {', '.join(str(arguments.out / name) for name in ('bench.json', 'bench.md', 'bench.html'))}")
    return 0 if any(each.rounds for each in findings.values()) else 1


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="make bench BENCH_OPTIONS=…",
        description="Measure ours beside other servers on real text, in one run.",
        epilog="examples:\n  make bench BENCH_OPTIONS=--quick\n"
        "  make bench BENCH_OPTIONS='--ours openvino-bf16-lean --peers fastapi,litserve --connections 16 --rounds 5'",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="few contenders, 1 and 16 connections, two short rounds")
    parser.add_argument("--ours", type=_names(OURS), help=f"of {', '.join(OURS)}; `none` for none (default: all)")
    parser.add_argument("--peers", type=_names(PEERS), help=f"of {', '.join(PEERS)}; `none` for none (default: all)")
    parser.add_argument("--connections", type=_numbers, help="how many, separated by commas (default: 1,4,16,64)")
    parser.add_argument("--rounds", type=int, help="how often everything is measured (default: 3)")
    parser.add_argument("--seconds", type=float, help="length of one window (default: 6)")
    parser.add_argument("--again", action="store_true", help="export ours anew, after a change of modelyard itself")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results (default: %(default)s)")
    return parser


def build_plan(arguments: argparse.Namespace) -> Plan:
    """Return what was asked for; every engine of ours brings its offline limit."""
    quick = arguments.quick
    ours = arguments.ours if arguments.ours is not None else [n for n, o in OURS.items() if o.is_quick or not quick]
    peers = arguments.peers if arguments.peers is not None else [n for n, p in PEERS.items() if p.is_quick or not quick]
    limits = {OURS[name].limit: OURS[name] for name in ours}
    return Plan(
        contenders=(
            *(OURS[name] for name in ours),
            *(PEERS[name] for name in peers),
            *(Limit(ours=each) for each in limits.values()),
        ),
        levels=arguments.connections or ((1, 16) if quick else (1, 4, 16, 64)),
        rounds=arguments.rounds or (2 if quick else 3),
        seconds=arguments.seconds or (1.5 if quick else 6.0),
    )


def prepare(plan: Plan, findings: dict[str, Findings], *, again: bool) -> None:
    """Export and install; what cannot be is noted."""
    # The reference is what others run, and what answers are compared with.
    measure.prepare(REFERENCE, again=again)
    for contender in plan.contenders:
        _say(f"  {contender.name}")
        of = contender.ours.name if isinstance(contender, Limit) else ""
        try:
            if of and findings[of].failure:
                raise measure.ContenderError(findings[of].failure)
            measure.prepare(contender, again=again and contender is not REFERENCE)
        except measure.ContenderError as exc:
            _give_up(findings[contender.name], exc)


def run_rounds(
    plan: Plan, able: list[Contender], findings: dict[str, Findings], texts: measure.Texts, deadline: float
) -> int:
    """Measure everybody in every round; return how many rounds were finished in time."""
    for number in range(plan.rounds):
        order = [each for each in able if not findings[each.name].failure]
        random.Random(number).shuffle(order)
        for contender in order:
            if time.monotonic() > deadline:
                _say("the limit is reached: what is left is given up")
                return number
            found = findings[contender.name]
            try:
                windows, start = measure.measure(contender, texts, plan.levels, plan.seconds)
            except measure.ContenderError as exc:
                _give_up(found, exc)
                continue
            found.rounds.append(windows)
            found.starts.append(start)
            figures = ", ".join(f"{each.connections}: {each.texts_per_s:.0f}/s" for each in windows)
            _say(f"  round {number + 1}  {contender.name:<28} {figures}")
    return plan.rounds


def describe_machine() -> dict[str, Any]:
    """Return what figures depend on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, cwd=CHECKOUT, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "cpu": model,
        "cores": CORES,
        "python": platform.python_version(),
        "commit": commit,
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }


def _describe(contender: Contender) -> Findings:
    kind = {"Ours": "ours", "Peer": "peer", "Limit": "limit"}[type(contender).__name__]
    limit = f"limit of {contender.limit}" if kind == "ours" else ""
    return Findings(name=contender.name, title=contender.title, kind=kind, limit=limit)


def _give_up(found: Findings, reason: Exception) -> None:
    found.failure = str(reason)
    _say(f"  given up: {found.name}: {reason}")


def _names(table: dict[str, Any]) -> Any:
    def read(text: str) -> list[str]:
        names = [] if text == "none" else text.split(",")
        if unknown := [name for name in names if name not in table]:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; expected of {', '.join(table)}")
        return names

    return read


def _numbers(text: str) -> tuple[int, ...]:
    numbers = tuple(int(word) for word in text.split(","))
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"expected numbers of at least 1, got {text}")
    return numbers


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
