"""A model that answers at once, and a server of it that can be killed and started again at the same place."""

import subprocess
import sys
from pathlib import Path

from harness import CHECKOUT
from launcher import Running

NAME = "instant"

# Says each text backwards, and how long it is.
_MODEL = """
import time

import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        time.sleep(PAUSE_S)
        return [self.answer(pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()) for request in requests]

    def answer(self, texts):
        backwards = [text.decode()[::-1].encode() for text in texts[:, 0]]
        lengths = np.array([[len(text), -len(text)] for text in texts[:, 0]], dtype=np.float32)
        return pb_utils.InferenceResponse([
            pb_utils.Tensor("BACKWARDS", np.array(backwards, dtype=np.object_).reshape(-1, 1)),
            pb_utils.Tensor("LENGTH", lengths.reshape(-1, 2)),
        ])
"""
_CONFIG = """
name: "instant"
backend: "python"
max_batch_size: 256
input [ { name: "TEXT" data_type: TYPE_STRING dims: [1] } ]
output [ { name: "BACKWARDS" data_type: TYPE_STRING dims: [1] }, { name: "LENGTH" data_type: TYPE_FP32 dims: [2] } ]
instance_group [ { kind: KIND_CPU count: 1 } ]
"""


def write_instant(repository: Path, *, pause_s: float = 0.0) -> Path:
    """Write the model, which may take some time over each request after all, and return the repository."""
    folder = repository / NAME
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(_MODEL.replace("PAUSE_S", str(pause_s)))
    (folder / "config.pbtxt").write_text(_CONFIG)
    return repository


def start_again(server: Running) -> None:
    """Start a server that has ended once more, with its options."""
    assert server.process.poll() is not None
    assert server.process.stderr is not None
    server.process.stderr.close()
    command = [sys.executable, "-m", "server", *server.options]
    server.process = subprocess.Popen(command, cwd=CHECKOUT, stderr=subprocess.PIPE, text=True)
