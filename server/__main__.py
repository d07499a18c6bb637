"""`python -m server`: the command line, and the container's entry point."""

import argparse
import signal
import sys
import tempfile
from pathlib import Path
from types import FrameType

from .control_key import open_key
from .doctor import examine, render
from .errors import ServerError
from .health import check_ensembles
from .installation import assemble_backends, find_installation
from .locations import BACKENDS, KEY_FILE, REPOSITORY, name_command
from .models import list_models
from .process import Endpoints, check_ports_free
from .status import Status, serve_status
from .supervisor import Settings, Supervisor

_EXAMPLES = f"""
examples:
  {name_command("serve")}
  {name_command("serve")} --repository /srv/models --host 0.0.0.0
  {name_command("serve")} --http-port 9000 --grpc-port 9001 --metrics-port 9002 --status-port 9003
  {name_command("check")}
  {name_command("doctor")}

exit codes: 0 stopped by Ctrl-C or SIGTERM and everything in flight was answered (--check: answers as verified;
--doctor: can serve), 1 could not start (--check: does not answer as verified; --doctor: cannot serve), 2 wrong
usage, 3 gave up on a tritonserver that died again and again, 4 stopped before everything in flight was answered
"""

_EXIT_UNANSWERED = 4


class StopSignals:
    """Ctrl-C and SIGTERM, counted.

    The handler does nothing else: it may interrupt any line, so it must take no lock and raise nothing.
    """

    def __init__(self) -> None:
        self._count = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def __call__(self) -> int:
        """Return how many there were."""
        return self._count

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._count += 1


def main() -> int:
    """Run the command line and return the exit code."""
    arguments = _build_parser().parse_args()
    endpoints = Endpoints(
        host=arguments.host,
        http_port=arguments.http_port,
        grpc_port=arguments.grpc_port,
        metrics_port=arguments.metrics_port,
        status_port=arguments.status_port,
    )
    try:
        if arguments.doctor:
            return diagnose(arguments.repository, endpoints, as_json=arguments.json)
        if arguments.check:
            return check(arguments.repository, endpoints)
        return serve(arguments, endpoints, StopSignals())
    except ServerError as exc:
        _say(f"error: {exc}")
        return exc.exit_code


def serve(arguments: argparse.Namespace, endpoints: Endpoints, stops: StopSignals) -> int:
    """Start tritonserver, tell when it answers, keep it alive, and stay until it is stopped.

    Raises:
        ServerError: It cannot start, or no model can be served, or it would not stay alive.
    """
    installation = find_installation()
    models = list_models(arguments.repository)
    key = open_key(arguments.key_file)
    check_ports_free(endpoints)
    status = Status(models)
    with tempfile.TemporaryDirectory(prefix="modelyard-server-") as folder:
        backends = Path(folder, "backends")
        backends.mkdir()
        assemble_backends(installation, BACKENDS, backends)
        _say(f"starting {installation.executable} ({installation.source}) on {arguments.repository}")
        settings = Settings(
            installation=installation,
            repository=arguments.repository,
            models=models,
            endpoints=endpoints,
            key=key,
            run_directory=Path(folder),
            verbose=arguments.verbose,
        )
        stop_status = serve_status(status, endpoints.host, endpoints.status_port)
        try:
            answered = Supervisor(settings, status, stops, _say).run()
        finally:
            stop_status()
    _say("stopped" if answered else "stopped before everything in flight was answered")
    return 0 if answered else _EXIT_UNANSWERED


def check(repository: Path, endpoints: Endpoints) -> int:
    """Ask the running server for the verified answer of every ensemble, as a container's health check does.

    Raises:
        CheckError: It does not give it.
    """
    for name, error in check_ensembles(endpoints.http_url, repository).items():
        _say(f"{name} answers as verified within {error:.1e}")
    return 0


def diagnose(repository: Path, endpoints: Endpoints, *, as_json: bool) -> int:
    """Print what this machine lacks to serve `repository`; return 1 if that keeps it from serving."""
    findings = examine(repository, endpoints)
    print(render(findings, as_json=as_json))  # noqa: T201
    return int(any(finding.verdict == "broken" for finding in findings))


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=name_command("serve"),
        description="Serve a model repository with the real tritonserver until Ctrl-C or SIGTERM.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--repository",
        type=Path,
        default=REPOSITORY,
        metavar="DIR",
        help="model repository (default: %(default)s)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--http-port", type=int, default=8000, help="default: %(default)s")
    parser.add_argument("--grpc-port", type=int, default=8001, help="default: %(default)s")
    parser.add_argument("--metrics-port", type=int, default=8002, help="tritonserver's metrics (default: %(default)s)")
    parser.add_argument(
        "--status-port", type=int, default=8003, help="/ready, and metrics of this launcher (default: %(default)s)"
    )
    parser.add_argument(
        "--key-file",
        type=Path,
        default=KEY_FILE,
        metavar="FILE",
        help="header that opens the control endpoints; made with mode 600 (default: %(default)s)",
    )
    parser.add_argument("--check", action="store_true", help="ask a running server for its verified answers, and end")
    parser.add_argument("--doctor", action="store_true", help="tell what this machine lacks to serve, and end")
    parser.add_argument("--json", action="store_true", help="with --doctor, as JSON")
    parser.add_argument("--verbose", action="store_true", help="show the whole log of tritonserver")
    return parser


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
