"""Processes that change what is served, killed at random moments; what is left must be served without a repair by hand.

    python -m benches.kill_anywhere [--kills 200] [--seed N]

A repository of two versions of a small model is served while a client asks without pause. Again and again one of these
begins, and SIGKILL meets it, or what it started, at a random moment of the time that it usually takes:

    activate    the other version
    promote     copying the other version out of another repository, as the newest
    run         exporting a checkpoint
    prune       removing all but the two newest versions
    launcher    a rollout, of which `python -m server` is killed
    server      a rollout, of which tritonserver is killed

After each, `lint` and `verify-repository` must find nothing, the version that is active must come to be served and to
answer as was proven, and the same command, given again, must end well.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tritonclient.http
from benches.soak import say
from benches.soak_rollouts import NAME, NEAR, make_input, publish_two
from geventhttpclient.response import HTTPConnectionClosed
from harness import CHECKOUT, run
from launcher import Running
from tritonclient.utils import InferenceServerException

from export.repository.contents import find_active_version, list_versions
from server.tritonserver.processes import read_stat

PATIENCE_S = 60.0

# What a client raises whose server has gone.
NO_ANSWER = (OSError, InferenceServerException, HTTPConnectionClosed)

VERBS = ("activate", "promote", "run", "prune")
VICTIMS = (*VERBS, "launcher", "server")

# Long enough for all of a rollout, whose victim is another process than the one that asked for it.
ROLLOUT_S = 1.5


@dataclass
class Found:
    """What came of it.

    Attributes:
        killed: Victim → how often it was met alive.
        late: Victim → how often it had ended before.
        wrong: What was not as it must be, in words.
        answers: Version's checkpoint, 1 or 2, or 0 for neither → answers.
        refused: Requests that failed.
    """

    killed: Counter[str] = field(default_factory=Counter)
    late: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    answers: Counter[int] = field(default_factory=Counter)
    refused: int = 0


class House:
    """A served repository, and another one that holds the same two checkpoints' versions.

    Args:
        folder: Where both lie, and the checkpoints in folders `1` and `2`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.origin = publish_two(folder)
        self.repository = Path(shutil.copytree(self.origin, folder / "served"))
        samples = [
            json.loads((self.origin / NAME / str(number) / "golden.json").read_text())["samples"][0]
            for number in (1, 2)
        ]
        self.text: str = samples[0]["inputs"][0]["data"][0]
        self.expected = {number: np.array(sample["outputs"][0]["data"]) for number, sample in enumerate(samples, 1)}
        self.server = self.start()

    def start(self) -> Running:
        """Start a launcher and wait until it serves.

        Raises:
            AssertionError: It does not come to that.
        """
        server = Running(self.repository)
        server.read_until("serving HTTP")
        server.follow()
        return server

    def write_command(self, verb: str) -> list[str]:
        """Return a command that changes what is served, from how things stand now."""
        active = find_active_version(self.repository, NAME)
        other = next(number for number in reversed(list_versions(self.repository / NAME)) if number != active)
        checkpoint = random.choice((1, 2))
        words = {
            "activate": [NAME, str(other), "--repository", self.repository],
            "promote": [NAME, str(checkpoint), "--repository", self.origin, "--to", self.repository],
            # With another warmup than any before it is another version, which answers the same.
            "run": [
                *(self.folder / str(checkpoint), "--name", NAME, "--repository", self.repository),
                *("--warmup", random.randrange(2, 500)),
            ],
            "prune": [NAME, "--keep", "2", "--repository", self.repository],
        }[verb]
        return [verb, *map(str, words)]

    def tell_which(self, vector: np.ndarray) -> int:
        """Return whose answer it is, of checkpoint 1 or 2; 0 for neither."""
        return next((n for n, expected in self.expected.items() if np.abs(vector - expected).max() < NEAR), 0)

    def ask(self) -> int:
        """Return whose answer a client gets now.

        Raises:
            NO_ANSWER: It gets none.
        """
        with tritonclient.http.InferenceServerClient(f"127.0.0.1:{self.server.http}") as client:
            return self.tell_which(
                client.infer(NAME, [make_input(tritonclient.http, self.text)]).as_numpy("EMBEDDING")[0]
            )

    def find_faults(self) -> Iterator[str]:
        """Yield what is not as it must be after a process was killed."""
        for verb in (["lint", str(self.repository)], ["verify-repository", "--repository", str(self.repository)]):
            done = run("-m", "export", *verb)
            if done.code:
                yield f"{verb[0]} ends with {done.code}: {done.out} {done.err}"
        if fault := self._find_unserved():
            yield fault

    def _find_unserved(self) -> str:
        """Return in which way the active version is not served, within the time that it may take; empty if it is."""
        fault = ""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            active = find_active_version(self.repository, NAME)
            golden = json.loads((self.repository / NAME / str(active) / "golden.json").read_text())
            wanted = self.tell_which(np.array(golden["samples"][0]["outputs"][0]["data"]))
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.server.status}/versions") as answer:
                    said = json.load(answer)["models"][NAME]
                got = self.ask()
            except NO_ANSWER as exc:
                fault = f"version {active} does not answer: {exc}"
            else:
                if (said["served"], said["state"], got) == (active, "served", wanted):
                    return ""
                fault = f"version {active} is active, and {said} is said to be served, which answers as {got}"
            time.sleep(0.05)
        return fault


class Asking:
    """A client that asks without pause, whatever becomes of the server."""

    def __init__(self, house: House, found: Found) -> None:
        self._house, self._found = house, found
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self) -> Asking:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join()

    def _ask(self) -> None:
        while not self._ended.wait(0.02):
            try:
                self._found.answers[self._house.ask()] += 1
            except NO_ANSWER:
                self._found.refused += 1


def list_family(pid: int) -> list[int]:
    """Return a process and all that it has started and that has not ended."""
    parents = {int(path.name): read_stat(int(path.name)) for path in Path("/proc").iterdir() if path.name.isdigit()}
    family = [pid]
    for each in family:
        family += [child for child, stat in parents.items() if stat and stat.parent == each and not stat.has_ended]
    return family


def wait_until_ended(processes: Sequence[int]) -> list[int]:
    """Wait until these have ended; return those that do not."""
    deadline = time.monotonic() + PATIENCE_S
    living = list(processes)
    while living and time.monotonic() < deadline:
        time.sleep(0.05)
        living = [pid for pid in living if (stat := read_stat(pid)) and not stat.has_ended]
    return living


def kill_command(house: House, verb: str, usual_s: float, found: Found) -> Iterator[str]:
    """Kill a command at a random moment; yield what is wrong afterwards."""
    words = house.write_command(verb)
    process = subprocess.Popen(
        [sys.executable, "-m", "export", *words], cwd=CHECKOUT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    # Rather late than early, for a command begins with loading what it needs.
    time.sleep(random.triangular(0, 1.1 * usual_s, usual_s))
    family = list_family(process.pid)
    process.kill()
    (found.killed if process.wait() == -signal.SIGKILL else found.late)[verb] += 1
    if left := wait_until_ended(family):
        yield f"{len(left)} processes that a killed {verb} had started are left"
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    yield from house.find_faults()
    # The same again, from what was meant and not from how things stand now.
    done = run("-m", "export", *words)
    if done.code:
        yield f"{' '.join(words)}, given again, ends with {done.code}: {done.err}"
    yield from house.find_faults()


def kill_server(house: House, victim: str, found: Found) -> Iterator[str]:
    """Kill the launcher, or its tritonserver, at a random moment of a rollout; yield what is wrong afterwards."""
    done = run("-m", "export", *house.write_command("activate"))
    if done.code:
        yield f"activate ends with {done.code}: {done.err}"
    time.sleep(random.uniform(0, ROLLOUT_S))
    family = list_family(house.server.process.pid)
    if victim == "launcher":
        house.server.process.kill()
        house.server.process.wait()
        if left := wait_until_ended(family):
            yield f"{len(left)} processes of a killed launcher are left"
        house.server = house.start()
    else:
        os.kill(house.server.tritonserver, signal.SIGKILL)
    found.killed[victim] += 1
    yield from house.find_faults()


def measure(house: House) -> dict[str, float]:
    """Return how long each command takes, in seconds, when nobody kills it."""
    usual = {}
    for verb in ("promote", "run", "activate", "prune"):
        start = time.monotonic()
        done = run("-m", "export", *house.write_command(verb))
        assert done.code == 0, done.err
        usual[verb] = time.monotonic() - start
        assert not (faults := list(house.find_faults())), faults
    return usual


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    options = parser.parse_args()
    random.seed(options.seed)
    say(f"seed {options.seed}")
    found = Found()
    with tempfile.TemporaryDirectory(prefix="modelyard-kills-") as folder:
        house = House(Path(folder))
        try:
            usual = measure(house)
            say(", ".join(f"{verb} takes {seconds:.1f} s" for verb, seconds in usual.items()))
            with Asking(house, found):
                for number in range(options.kills):
                    victim = random.choice(VICTIMS)
                    kill = (
                        kill_command(house, victim, usual[victim], found)
                        if victim in VERBS
                        else kill_server(house, victim, found)
                    )
                    for fault in kill:
                        found.wrong.append(f"{number}, {victim}: {fault}")
                        say(found.wrong[-1])
                    if number % 20 == 19:
                        say(f"  {number + 1:>4} kills, {len(found.wrong)} faults")
        finally:
            house.server.stop()
    say(", ".join(f"{victim} killed {found.killed[victim]} times, {found.late[victim]} too late" for victim in VICTIMS))
    right = found.answers[1] + found.answers[2]
    say(f"{right} answers of one version, {found.answers[0]} of neither, {found.refused} requests failed")
    say(f"{len(found.wrong)} faults")
    return 1 if found.wrong or found.answers[0] else 0


if __name__ == "__main__":
    sys.exit(main())
