"""What one request costs, step by step: time in each model by tritonserver's own counters, cores by process, bytes.

    python -m benches.request_cost [--repository DIR] [--name NAME] [--requests 500] [--json FILE]

Starts `python -m server`, asks one text at a time and then 32 at once, and divides what was counted meanwhile by the
number of requests. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import threading
import time
import urllib.request
from collections import defaultdict
from pathlib import Path

import numpy as np
import tritonclient.http
from benches.soak import say
from benches.soak_rollouts import NAME, publish_two
from launcher import Running, running

from server.tritonserver.processes import list_children

CLIENTS = 32

# What tritonserver counts of each model, microseconds.
PARTS = ("queue", "compute_input", "compute_infer", "compute_output")

_TICKS = os.sysconf("SC_CLK_TCK")


def read_durations(server: Running) -> dict[str, float]:
    """Return `model part` → seconds since the start."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found: dict[str, float] = defaultdict(float)
    for part, model, value in re.findall(r'^nv_inference_(\w+)_duration_us\{model="([^"]+)"[^}]*\} (\S+)$', text, re.M):
        if part in PARTS:
            found[f"{model} {part}"] += float(value) / 1e6
    return found


def read_cores(server: Running) -> dict[str, float]:
    """Return kind of process → seconds on a core since the start."""
    launcher, triton = server.process.pid, server.tritonserver
    kinds = {launcher: "launcher", triton: "tritonserver"} | dict.fromkeys(list_children(triton), "backend processes")
    found: dict[str, float] = defaultdict(float)
    for pid, kind in kinds.items():
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        found[kind] += (int(fields[11]) + int(fields[12])) / _TICKS
    return found


def ask(server: Running, name: str, text: str, requests: int) -> list[float]:
    """Send one request after another, and return what each took, seconds."""
    tensor = tritonclient.http.InferInput("TEXT", [1, 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[text.encode()]], dtype=object))
    took = []
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.http}") as client:
        for _ in range(requests):
            start = time.monotonic()
            client.infer(name, [tensor])
            took.append(time.monotonic() - start)
    return took


def measure(server: Running, name: str, text: str, requests: int, clients: int) -> dict[str, float]:
    """Return what a request costs while so many are in flight: seconds by part, on cores, and until its answer."""
    durations, cores, start = read_durations(server), read_cores(server), time.monotonic()
    took: list[float] = []
    threads = [
        threading.Thread(target=lambda: took.extend(ask(server, name, text, requests // clients)))
        for _ in range(clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - start
    parts = {key: value - durations[key] for key, value in read_durations(server).items()}
    parts |= {f"cores of {key}": value - cores[key] for key, value in read_cores(server).items()}
    found = {key: value / len(took) for key, value in sorted(parts.items()) if value > 0}
    return found | {"until the answer": float(np.median(took)), "requests a second": len(took) / seconds}


def count_bytes(server: Running, name: str, text: str) -> dict[str, int]:
    """Return the bytes of a request's and an answer's body, as binary tensors and as JSON."""
    tensor = tritonclient.http.InferInput("TEXT", [1, 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[text.encode()]], dtype=object))
    body, _ = tritonclient.http.InferenceServerClient.generate_request_body([tensor])
    as_json = json.dumps({"inputs": [{"name": "TEXT", "datatype": "BYTES", "shape": [1, 1], "data": [text]}]}).encode()
    url = f"http://127.0.0.1:{server.http}/v2/models/{name}/infer"
    with urllib.request.urlopen(urllib.request.Request(url, as_json), timeout=30) as answer:
        json_answer = len(answer.read())
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.http}") as client:
        values = client.infer(name, [tensor]).as_numpy("EMBEDDING")
    return {"request": len(body), "answer": values.nbytes, "request, JSON": len(as_json), "answer, JSON": json_answer}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--repository", type=Path, help="of a model of TEXT and EMBEDDING (default: a small one, made)")
    parser.add_argument("--name", default=NAME, help="the model (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--text", default="A cat sleeps on the mat while it rains.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured here as well")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="modelyard-cost-"))
    try:
        with running(options.repository or publish_two(folder)) as server:
            server.read_until("serving HTTP")
            server.follow()
            ask(server, options.name, options.text, 50)
            found = {
                "one in flight": measure(server, options.name, options.text, options.requests, 1),
                f"{CLIENTS} in flight": measure(server, options.name, options.text, options.requests, CLIENTS),
                "bytes": count_bytes(server, options.name, options.text),
            }
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    whole = found["one in flight"]["until the answer"]
    for title, parts in found.items():
        say(f"{title}:")
        for key, value in parts.items():
            is_time = title != "bytes" and key != "requests a second"
            say(f"  {value * 1e6:>10.0f} µs  {value / whole:>6.2f}  {key}" if is_time else f"  {value:>10.0f}  {key}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
