"""How near `tune` comes to a full sweep of the same ways to serve: `make bench-tune`.

    python -m benches.bench_tune [--p99-ms 300] [--connections 16] [--ours NAME]

`tune` measures every way for a moment and the better ones again; the sweep measures every way as long as `tune` does
its last three, in three turns. Told are how many requests per second the sweep saw of the way that `tune` took, beside
the best of the sweep that holds the limit, and how long each of the two took.
"""

import argparse
import json
import subprocess
import sys
import time

from benches.serving import measure
from benches.serving.contenders import OURS
from harness import CHECKOUT

from demo.serving import NAME
from export.repository.contents import find_active_version
from export.repository.version import find_version
from export.tuning import trial
from export.tuning.search import Figures, plan_rounds
from export.tuning.ways import Way, find_graph, list_ways, write_way

_TURNS = 3
# As long as the final of `tune`, whose rounds are each three times as long as the one before.
_GROWTH = 3


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench-tune", description=__doc__)
    parser.add_argument("--p99-ms", type=float, default=300.0, help="limit of 99 requests in 100 (default: 300)")
    parser.add_argument("--connections", type=int, default=16, help="requests in flight (default: 16)")
    parser.add_argument("--ours", choices=OURS, default="onnxruntime-fp32-lean", help="what is served")
    arguments = parser.parse_args()
    ours = OURS[arguments.ours]
    measure.prepare(ours, again=False)
    begun = time.monotonic()
    chosen = run_tune(arguments, str(ours.repository))
    if chosen is None:
        return 1
    tuned_s = time.monotonic() - begun
    swept = sweep(arguments)
    swept_s = time.monotonic() - begun - tuned_s
    return tell(chosen, swept, arguments.p99_ms, tuned_s, swept_s)


def run_tune(arguments: argparse.Namespace, repository: str) -> dict[str, int] | None:
    """Return the options that `tune` finds, or None where it has said why it finds none."""
    command = [sys.executable, "-m", "export", "tune", NAME, "--repository", repository, "--fresh", "--json"]
    command += ["--p99-ms", str(arguments.p99_ms), "--connections", str(arguments.connections)]
    done = subprocess.run(command, cwd=CHECKOUT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        return None
    best: dict[str, int] = json.loads(done.stdout)["best"]
    return best


def sweep(arguments: argparse.Namespace) -> dict[Way, list[Figures]]:
    """Return what every way answers, each as long as the last ones of a search and in turns with the others."""
    repository = OURS[arguments.ours].repository
    version = find_version(repository, NAME, find_active_version(repository, NAME))
    configs = version.read_configs()
    graph = find_graph(configs, NAME)
    ways = list_ways(configs[graph])
    length = _GROWTH ** (len(plan_rounds(len(ways))) - 1)
    load = trial.Load(connections=arguments.connections, protocol="http")
    found: dict[Way, list[Figures]] = {way: [] for way in ways}
    for turn in range(_TURNS):
        for way in ways:
            changed = {**configs, graph: write_way(configs[graph], way)}
            found[way].append(trial.measure(version, changed, load, length))
            print(f"  turn {turn + 1}: {way}: {found[way][-1]}", file=sys.stderr, flush=True)  # noqa: T201
    return found


def tell(chosen: dict[str, int], swept: dict[Way, list[Figures]], p99_ms: float, tuned_s: float, swept_s: float) -> int:
    """Print every way, and how the one of `tune` stands among them; return 1 where the sweep did not see it."""
    medians = {
        way: sorted(figures, key=lambda each: each.requests_per_s)[_TURNS // 2] for way, figures in swept.items()
    }
    for way, figures in sorted(medians.items(), key=lambda item: -item[1].requests_per_s):
        rates = [each.requests_per_s for each in swept[way]]
        mark = "  <- tune" if way.to_options() == chosen else ""
        print(  # noqa: T201
            f"{way.to_options()}: {figures.requests_per_s:.1f} requests/s ({min(rates):.1f} to {max(rates):.1f}), "
            f"p99 {figures.p99_ms:.0f} ms{mark}"
        )
    best = max((each.requests_per_s for each in medians.values() if each.p99_ms <= p99_ms), default=0.0)
    taken = next((each.requests_per_s for way, each in medians.items() if way.to_options() == chosen), 0.0)
    ratio = f"{taken / best:.3f}" if best else "nothing held the limit"
    print(f"tune {tuned_s:.0f} s, sweep {swept_s:.0f} s; the way of tune to the best of the sweep: {ratio}")  # noqa: T201
    return 0 if taken and best else 1


if __name__ == "__main__":
    sys.exit(main())
