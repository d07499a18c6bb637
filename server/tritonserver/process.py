"""One tritonserver process: its command line, its log, its end."""

import ctypes
import re
import resource
import signal
import subprocess
import threading
import time
from pathlib import Path

from ..errors import ShortageError
from ..log import Log
from .installation import build_environment
from .private_memory import keep_shared_memory_private
from .processes import DEADLY_SIGNALS, is_handling
from .settings import Settings

# Requests in flight get this long to be answered when the server stops. Docker's own grace period is the same.
EXIT_TIMEOUT_S = 10

# What tritonserver hands on of an HTTP request, for the steps of texts to tell an empty one from a body that was lost.
FORWARDED_HEADERS = "(?i)host|content-(encoding|length)|transfer-encoding"

# When it runs into its own timeout, tritonserver 2.51 crashes: the launcher is sooner, unless it was killed.
_OWN_EXIT_TIMEOUT_S = EXIT_TIMEOUT_S + 3

# Of each thread; only what is used takes memory. With the usual 8 MiB, tritonserver 2.51 dies of SIGSEGV when it parses
# a request body of 3 MB or one with 200,000 nested brackets; with this, bodies of 100 MB are answered.
STACK_BYTES = 1 << 30

# Of each instance of a Python backend, for what its process asks of tritonserver and for answers in pieces. By itself
# it has 32, of which nearly all sleep for ever: three models of text had 666 threads in all, and have 230.
_POOL_THREADS = 4

# tritonserver 2.51 logs these as errors and warnings wherever there is no GPU, and they mean nothing else.
_HARMLESS_WITHOUT_GPU = (
    b"CudaDriverHelper has not been initialized",
    b"unable to create stream for",
    b"failed to allocate pinned system memory",
)

# What a backend process says of the end of its tritonserver, of which the launcher tells.
_ORPHANED = b"Non-graceful termination detected"

# Information, as glog begins such a line. Backend processes log it whatever --log-info says.
_INFORMATION = re.compile(rb"I\d{4} ")

# What tritonserver 2.51 logs as it handles a signal. Of one that it does not survive it then writes where it was, for
# which it allocates: if its memory is corrupt it may wait for itself there, and answers some and others never.
_SIGNAL = re.compile(rb"Signal \((\d{1,2})\) received\.\s*")

# Those of which it hangs up on whoever connects, answers what is in flight, and ends.
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM)

# How tritonserver begins to list its options, where it was given one that it does not know.
_USAGE = b"Usage: tritonserver [options]\n"
_BEHIND_USAGE = (b"Bad option: ", b"Unexpected argument: ")

# What it gets to end of a deadly signal by itself.
_DYING_S = 1.0

# How libraries colour their lines (ECMA-48, SGR), whether anybody sees it or a file is written.
_COLOUR = re.compile(rb"\x1b\[[0-9;]*m")

_PR_SET_PDEATHSIG = 1

# Looked up here: between fork and exec nothing should be allocated.
_LIBC = ctypes.CDLL(None)


class TritonServer:
    """A tritonserver in a session of its own, so that Ctrl-C reaches only us and we decide how it ends.

    Args:
        settings: What to serve, and how.
        models: Names of the models to load.
        options: What their configurations ask of the server.
        log: Log that its lines go to.

    Raises:
        ShortageError: It could not even be started.
    """

    def __init__(self, settings: Settings, models: list[str], options: list[str], log: Log) -> None:
        self._key, self._is_verbose = settings.key, settings.verbose
        self._log = log
        # The deadly signal that its log tells of, and when it did.
        self._crash: tuple[int, float] | None = None
        # The same of a signal to end.
        self._farewell: tuple[int, float] | None = None
        # An empty working directory: the Python backend has it first on sys.path.
        working_directory = settings.run_directory / "empty"
        try:
            working_directory.mkdir(exist_ok=True)
            self._process = subprocess.Popen(
                [*_build_command(settings, models), *options, *settings.key.options, *settings.passed_options],
                cwd=working_directory,
                env=build_environment(settings.installation, settings.interpreter),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_prepare_process,
            )
            self._reader = threading.Thread(target=self._relay_log, daemon=True)
            self._start_reader()
        # SubprocessError: the child could not be prepared.
        except (OSError, MemoryError, subprocess.SubprocessError) as exc:
            raise ShortageError(
                "tritonserver cannot be started",
                expected="a process, a thread, memory and descriptors for it",
                got=f"'{exc}'",
                remedy="free some, or raise the limit",
            ) from exc

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        return self._process.poll()

    def find_crash(self) -> int:
        """Return the signal in whose handler it stays for good, or 0.

        Anything may be written to its log: whether a thread of it handles that signal, the kernel says.
        """
        if self._crash is None or time.monotonic() - self._crash[1] < _DYING_S:
            return 0
        number, _ = self._crash
        if is_handling(self.pid, number):
            return number
        self._crash = None
        return 0

    @property
    def told_to_end(self) -> int:
        """The signal to end that its log tells of, or 0.

        Anything may be written to its log: one that goes on for longer than it takes to end was not told to.
        """
        number, moment = self._farewell or (0, 0.0)
        return number if time.monotonic() - moment < _OWN_EXIT_TIMEOUT_S else 0

    def terminate(self) -> None:
        """Tell it to answer what is in flight, refuse new connections and end."""
        self._process.terminate()

    def pause(self) -> None:
        """Have it do nothing more; what it has written goes on to whom it is for."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on where a signal has stopped it."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> int:
        """End it at once, if it has not ended yet, and return its exit code."""
        self._process.kill()
        code = self._process.wait()
        # A backend process that outlives it by a moment holds the other end of the pipe.
        self._reader.join(timeout=2)
        return code

    def _start_reader(self) -> None:
        try:
            self._reader.start()
        except RuntimeError as exc:
            self._process.kill()
            self._process.wait()
            raise OSError(str(exc)) from exc

    def _note(self, number: int) -> None:
        if number in DEADLY_SIGNALS:
            self._crash = number, time.monotonic()
        elif number in _ENDING_SIGNALS:
            self._farewell = number, time.monotonic()

    def _relay_log(self) -> None:
        assert self._process.stdout is not None, "Bug: tritonserver was started without a pipe"
        is_usage = False
        for line in self._process.stdout:
            # Hundreds of lines follow before it ends; the one that matters is above them, or below.
            is_usage = (is_usage or line == _USAGE) and not line.startswith(_BEHIND_USAGE)
            if is_usage and not self._is_verbose:
                continue
            if received := _SIGNAL.fullmatch(line):
                self._note(int(received[1]))
            if self._is_verbose or not _is_noise(line):
                self._log.relay(self._key.redact(_COLOUR.sub(b"", line)))


def _is_noise(line: bytes) -> bool:
    """Tell whether a line of the log means nothing to an operator."""
    is_harmless = any(text in line for text in (*_HARMLESS_WITHOUT_GPU, _ORPHANED))
    return not line.strip() or bool(_INFORMATION.match(line)) or is_harmless


def _build_command(settings: Settings, models: list[str]) -> list[str]:
    endpoints = settings.endpoints
    has_gpu = Path("/dev/nvidiactl").exists()
    command = [
        str(settings.installation.executable),
        f"--model-repository={settings.overlay.resolve()}",
        f"--backend-directory={settings.backends}",
        # Its own default is a folder of NVIDIA's image.
        f"--cache-directory={settings.caches}",
        # Explicit, for polling sees half-copied models. Complete configs are required, so nothing is guessed.
        "--model-control-mode=explicit",
        *(f"--load-model={name}" for name in models),
        "--disable-auto-complete-config",
        f"--backend-config=python,thread-pool-size={_POOL_THREADS}",
        # One broken model does not keep its neighbours from being served.
        "--exit-on-error=false",
        f"--http-address={endpoints.libevent_host}",
        f"--grpc-address={endpoints.bracketed_host}",
        f"--metrics-address={endpoints.libevent_host}",
        f"--http-port={endpoints.http_port}",
        f"--grpc-port={endpoints.grpc_port}",
        f"--metrics-port={endpoints.metrics_port}",
        f"--http-header-forward-pattern={FORWARDED_HEADERS}",
        f"--exit-timeout-secs={_OWN_EXIT_TIMEOUT_S}",
        f"--log-info={str(settings.verbose).lower()}",
    ]
    if not has_gpu:
        command += ["--allow-gpu-metrics=false", "--pinned-memory-pool-byte-size=0"]
    return command


def _prepare_process() -> None:
    # Runs in the child between fork and exec. If we are killed, tritonserver is told to stop as well.
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    keep_shared_memory_private()
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    soft = STACK_BYTES if hard == resource.RLIM_INFINITY else min(STACK_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_STACK, (soft, hard))
