"""Programs whose libraries are loaded already: what a test runs begins at once instead of after five seconds.

On a small model `python -m export` spends half of its time loading torch, transformers and the exporter. A process that
has loaded them waits on a socket, and each run is a fork of it: with its own arguments, folder, environment and files,
and it ends as it would have ended. What is tested of start itself, or of signals, starts a Python of its own.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

_HERE = Path(__file__).resolve().parent

# Asks a warm process, and ends as what it ran. It loads next to nothing itself.
ASK = str(_HERE / "ask_warm.py")

# The socket of the warm process.
ADDRESS = "MODELYARD_WARM"

# Under both names that the checkout knows `export` by. What they load when they run is loaded here as well.
_LIBRARIES = (
    "torch.export._trace",
    "torch.onnx._internal.exporter._core",
    "torch.onnx._internal.exporter._torchlib.ops",
    "onnxscript.function_libs.torch_lib.ops",
    "onnxscript.rewriter.onnx_fusions",
    "transformers.models.bert.modeling_bert",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "export.pipeline",
    "export.commands.run",
    "modelyard.export.pipeline",
    "modelyard.export.commands.run",
)


@cache
def keep_warm() -> Mapping[str, str]:
    """Start a warm process, which ends with this one, and return the variables with which it is asked."""
    folder = tempfile.TemporaryDirectory(prefix="modelyard-warm-")
    address = str(Path(folder.name, "socket"))
    process = subprocess.Popen([sys.executable, __file__, address], cwd=_HERE.parent, stdout=subprocess.PIPE)
    atexit.register(_end, process, folder)
    assert process.stdout and process.stdout.readline(), "the warm process did not begin"
    return {ADDRESS: address}


def _end(process: "subprocess.Popen[bytes]", folder: "tempfile.TemporaryDirectory[str]") -> None:
    process.kill()
    process.communicate()
    folder.cleanup()


def _wait(address: str) -> None:
    """Fork for everyone who asks; return in the forks alone, when what they ran has ended."""
    parent = os.getppid()
    for name in _LIBRARIES:
        importlib.import_module(name)
    # Pages that the collector does not touch stay shared.
    gc.collect()
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    sys.stdout.write("warm\n")
    sys.stdout.flush()
    # Nobody waits for those who wait for the runs.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    # It ends with whoever started it, however that one ends.
    listener.settimeout(1)
    while os.getppid() == parent:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            connection.settimeout(None)
            _answer(connection)
            return
        connection.close()
    os._exit(0)


def _answer(connection: socket.socket) -> None:
    """Run what is asked for in a process of its own, and tell how it ended; return in that process alone."""
    data, files, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    asked = json.loads(data)
    process = os.fork()
    if process:
        for file in files:
            os.close(file)
        threading.Thread(target=_end_with, args=(connection, process), daemon=True).start()
        _, status = os.waitpid(process, 0)
        connection.sendall(b"%d" % os.waitstatus_to_exitcode(status))
        os._exit(0)
    connection.close()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(asked["folder"])
    if Path("export", "__init__.py").is_file() and not Path.cwd().samefile(_HERE.parent):
        # A copy of ours with something added: what is warm of it are the libraries.
        for name in [name for name in sys.modules if name.partition(".")[0] in ("export", "modelyard")]:
            del sys.modules[name]
        sys.path[:1] = [asked["folder"]]
    os.environ.clear()
    os.environ.update(asked["environment"])
    module, *words = asked["words"]
    sys.argv[1:] = words
    # As `python -m` does it.
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _end_with(connection: socket.socket, process: int) -> None:
    """End what runs when whoever asked for it is gone."""
    if not connection.recv(1):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGTERM)


def command(words: Sequence[str]) -> list[str]:
    """Return the command that runs a module and its words in a warm process."""
    return [sys.executable, "-I", "-S", ASK, *words]


if __name__ == "__main__":
    sys.path[:1] = [str(_HERE.parent)]
    _wait(sys.argv[1])
