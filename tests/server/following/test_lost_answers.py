"""Processes that end while their model is asked for its verified answer: that is known at once, and tried again."""

import json
import re
from pathlib import Path

from followed import read_following, wait_for
from launcher import Running, running

from server.following.published import read_repository
from server.following.sums import FileSums

# Answers in pieces, but for the first question, of which it dies: as it takes it, which tritonserver tells whoever
# asks, or later, when that waits for ever.
MORTAL = """
import os
import signal
import threading
from pathlib import Path
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            if not Path({mark!r}).exists():
                Path({mark!r}).touch()
                self.end = threading.Timer({seconds}, os.kill, (os.getpid(), signal.SIGKILL))
                self.sender = request.get_response_sender()
                self.end.start()
                if not {seconds}:
                    self.end.join()
                continue
            sender = request.get_response_sender()
            text = pb_utils.Tensor("text_output", np.array([b"told"], object))
            sender.send(pb_utils.InferenceResponse([text]), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""

CONFIG = """
name: "{name}"
backend: "python"
version_policy {{ specific {{ versions: 1 }} }}
model_transaction_policy {{ decoupled: true }}
input {{ name: "text_input" data_type: TYPE_STRING dims: [1] }}
output {{ name: "text_output" data_type: TYPE_STRING dims: [1] }}
"""


def make_mortal(folder: Path, mark: Path, seconds: float = 0.2) -> None:
    """Make a version of a model that dies once, as it is asked for its verified answer."""
    tensor = {"datatype": "BYTES", "shape": [1]}
    sample = {
        "inputs": [{"name": "text_input", **tensor, "data": ["tell"]}],
        "outputs": [{"name": "text_output", **tensor, "data": ["told"]}],
    }
    (folder / "1").mkdir(parents=True)
    golden = {"decoupled": True, "tolerances": {"max_abs_error": 1e-5}, "samples": [sample]}
    (folder / "1" / "golden.json").write_text(json.dumps(golden))
    (folder / "1" / "model.py").write_text(MORTAL.format(mark=str(mark), seconds=seconds))
    (folder / "config.pbtxt").write_text(CONFIG.format(name=folder.name))


def find_lines(server: Running, pattern: str) -> list[str]:
    return [line for line in server.lines if re.search(pattern, line)]


def test_a_process_that_ends_instead_of_answering_costs_its_model_a_second_try(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    make_mortal(repository / "first", tmp_path / "mark")
    (tmp_path / "mark").touch()
    assert read_repository(repository, FileSums())["first"].version == 1
    with running(repository) as server:
        server.read_until("serving HTTP")
        server.follow()
        for name, seconds in (("second", 0.2), ("third", 0)):
            make_mortal(tmp_path / name, tmp_path / f"mark of {name}", seconds)
            (tmp_path / name).rename(repository / name)
        for name in ("second", "third"):
            wait_for(server, lambda models, name=name: models.get(name, {}).get("state") == "served")
            (told,) = find_lines(server, f"^ERROR: version 1 of {name} cannot be served")
            assert re.search("process \\d+ was killed by SIGKILL while it was asked; it is not served, look for", told)
            assert told.endswith("Tried again in 1 s, or once the repository changes.")
        assert read_following(server)["first"]["state"] == "served"
        # Their ends are known by now.
        wait_for(server, lambda _: len(find_lines(server, r"_0 \(.* another has taken its place$")) == 2)
        assert not find_lines(server, "loading it anew")


def test_so_it_is_as_a_server_starts(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    make_mortal(repository / "only", tmp_path / "mark")
    with running(repository) as server:
        server.read_until("serving HTTP")
        server.follow()
        wait_for(server, lambda models: models["only"]["state"] == "served")
        assert find_lines(server, "only .* FAILED: process \\d+ was killed by SIGKILL while it was asked$")
