"""A model that somebody unloads: it is not served, and whoever asks is told so."""

import json
import os
import re
import signal
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from followed import wait_for
from harness import Published
from launcher import Running, running

from export.commands.waiting import wait_until_served
from export.errors import ServingError
from server.tritonserver.control import Control
from server.tritonserver.control_key import open_key


def read_readiness(server: Running) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.status}/ready", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as exc:
        return exc.code, exc.read().decode()


def wait_for_readiness(server: Running, code: int) -> str:
    deadline = time.monotonic() + 60
    while (found := read_readiness(server))[0] != code:
        assert time.monotonic() < deadline, found
        time.sleep(0.1)
    return found[1]


def test_readiness_follows_what_is_unloaded_and_loaded(published: Published, tmp_path: Path) -> None:
    key_file = tmp_path / "control.key"
    public, step = "sentence_embedding", "sentence_embedding_preprocess"
    with running(published.repository, "--key-file", str(key_file)) as server:
        server.read_until("serving HTTP")
        server.follow()
        assert wait_for_readiness(server, 200) == "ready\n"
        address = ("127.0.0.1", server.grpc)
        control = Control(f"http://127.0.0.1:{server.http}", open_key(key_file), address)
        # The public model alone; one of its steps, which takes the public one with it.
        for unloaded, to_load in ((public, [public]), (step, [step, public])):
            control.unload(unloaded)
            assert wait_for_readiness(server, 503) == "not ready: none of 1 models is served\n"
            server.wait_for_line(f"warning: {unloaded} is not loaded any more", limit_s=60)
            assert server.read_metrics()["modelyard_ready"] == 0
            reason = f"{unloaded} is not loaded any more: expected it to answer, got '"
            known = wait_for(server, lambda models, reason=reason: models[public]["reason"].startswith(reason))[public]
            assert (known["active"], known["served"], known["state"]) == (1, 0, "failed")
            for options in ([], ["--any-version"]):
                checked = server.check(*options)
                assert (checked.code, checked.err.count(known["reason"])) == (1, 1)
            with pytest.raises(ServingError, match=re.escape(f"got none, for: {known['reason']}")):
                wait_until_served(f"localhost:{server.status}", public, 1, print)
            for name in to_load:
                control.load(name)
            assert wait_for_readiness(server, 200) == "ready\n"
            server.wait_for_line("is loaded again", limit_s=60)
            wait_until_served(f"localhost:{server.status}", public, 1, print)
            assert server.check().code == 0
        assert not any("loading it anew" in line for line in server.lines)


def test_what_is_unloaded_as_a_process_of_it_has_died_is_told_of_as_unloaded(
    published: Published, tmp_path: Path
) -> None:
    key_file = tmp_path / "control.key"
    public, step = "sentence_embedding", "sentence_embedding_preprocess"
    with running(published.repository, "--key-file", str(key_file)) as server:
        server.read_until("serving HTTP")
        server.follow()
        control = Control(f"http://127.0.0.1:{server.http}", open_key(key_file), ("127.0.0.1", server.grpc))
        # The launcher sees the death after that.
        os.kill(server.process.pid, signal.SIGSTOP)
        try:
            server.find_stubs(step)[0].kill()
            control.unload(step)
        finally:
            os.kill(server.process.pid, signal.SIGCONT)
        assert wait_for_readiness(server, 503) == "not ready: none of 1 models is served\n"
        # tritonserver 2.51 lets go of no model of which a process was killed.
        reasons = (f"{step} is being unloaded: ", f"{step} is not loaded any more: ")
        wait_for(server, lambda models: models[public]["reason"].startswith(reasons))
        deadline = time.monotonic() + 60
        while server.find_stubs(step):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert f"{step}: it has been unloaded meanwhile, and is not loaded anew" in server.lines
        for name in (step, public):
            control.load(name)
        assert wait_for_readiness(server, 200) == "ready\n"


_WAITING = """
import os, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        open({taken!r}, "w").close()
        while os.path.exists({fuse!r}):
            time.sleep(0.05)
        answer = pb_utils.Tensor("Y", np.ones((1, 1), np.float32))
        return [pb_utils.InferenceResponse([answer]) for _ in requests]
"""
_CONFIG = """
backend: "python"
max_batch_size: 1
input { name: "X" data_type: TYPE_FP32 dims: [1] }
output { name: "Y" data_type: TYPE_FP32 dims: [1] }
instance_group { kind: KIND_CPU }
"""


def test_what_lets_nobody_new_in_while_it_still_answers_is_told_of(tmp_path: Path) -> None:
    fuse, taken, folder = tmp_path / "fuse", tmp_path / "taken", tmp_path / "models" / "patient"
    fuse.touch()
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(_WAITING.format(fuse=str(fuse), taken=str(taken)))
    (folder / "config.pbtxt").write_text(_CONFIG)
    key_file = tmp_path / "control.key"
    with running(folder.parent, "--key-file", str(key_file)) as server, ThreadPoolExecutor(1) as pool:
        server.read_until("serving HTTP")
        server.follow()
        values = {"name": "X", "shape": [1, 1], "datatype": "FP32", "data": [1]}
        url = f"http://127.0.0.1:{server.http}/v2/models/patient/infer"
        asked = urllib.request.Request(url, json.dumps({"inputs": [values]}).encode())
        answer = pool.submit(urllib.request.urlopen, asked, timeout=60)
        while not taken.exists():
            time.sleep(0.05)
        control = Control(f"http://127.0.0.1:{server.http}", open_key(key_file), ("127.0.0.1", server.grpc))
        control.unload("patient")
        assert wait_for_readiness(server, 503) == "not ready: none of 1 models is served\n"
        server.wait_for_line("warning: patient is being unloaded: expected it to let callers in", 60)
        fuse.unlink()
        assert answer.result(60).status == 200
        control.load("patient")
        assert wait_for_readiness(server, 200) == "ready\n"
