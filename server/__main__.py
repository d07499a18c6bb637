"""`python -m server`: the command line, and the container's entry point."""

import argparse
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType

from server.errors import ServerError, StartError
from server.health import ModelState, check_answer, is_live, read_states
from server.installation import assemble_backends, find_installation
from server.models import list_models
from server.process import EXIT_TIMEOUT_S, Endpoints, TritonServer, check_ports_free

_CHECKOUT = Path(__file__).resolve().parent.parent

_EXAMPLES = """
examples:
  python -m server
  python -m server --repository /srv/models --host 0.0.0.0
  python -m server --http-port 9000 --grpc-port 9001 --metrics-port 9002

exit codes: 0 stopped by Ctrl-C or SIGTERM, 1 could not start or tritonserver ended by itself, 2 wrong usage
"""


class _Stopped(BaseException):
    """Ctrl-C or SIGTERM. No Exception, so that no handler of faults takes it for one."""


def main() -> int:
    """Run the command line and return the exit code."""
    arguments = _build_parser().parse_args()
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, _stop)
    try:
        return serve(arguments)
    except ServerError as exc:
        _say(f"error: {exc}")
        return 1
    except _Stopped:
        return 0


def serve(arguments: argparse.Namespace) -> int:
    """Start tritonserver, tell when it answers, and stay until it is stopped.

    Raises:
        ServerError: It cannot start, or no model can be served.
    """
    repository: Path = arguments.repository
    endpoints = Endpoints(
        host=arguments.host,
        http_port=arguments.http_port,
        grpc_port=arguments.grpc_port,
        metrics_port=arguments.metrics_port,
    )
    installation = find_installation()
    models = list_models(repository)
    check_ports_free(endpoints)
    with tempfile.TemporaryDirectory(prefix="modelyard-server-") as folder:
        backends = Path(folder, "backends")
        backends.mkdir()
        assemble_backends(installation, _CHECKOUT / "backends", backends)
        _say(f"starting {installation.executable} ({installation.source}) on {repository}")
        server = TritonServer(
            installation,
            repository=repository,
            models=models,
            endpoints=endpoints,
            run_directory=Path(folder),
            verbose=arguments.verbose,
        )
        try:
            _wait_until_live(server, endpoints)
            _report_models(repository, endpoints, models)
            _say(_describe(endpoints))
            code = server.wait()
        except _Stopped:
            _say(f"stopping: answering what is in flight, {EXIT_TIMEOUT_S} s at most; once more to stop at once")
            return _drain(server)
        finally:
            server.stop()
    raise StartError(f"tritonserver ended by itself: expected it to run until it is stopped, got exit code {code}.")


def _drain(server: TritonServer) -> int:
    try:
        server.stop()
    except _Stopped:
        server.kill()
        server.stop()
        _say("stopped at once")
        return 0
    _say("stopped")
    return 0


def _wait_until_live(server: TritonServer, endpoints: Endpoints) -> None:
    start = told = time.monotonic()
    while not is_live(endpoints.http_url):
        code = server.poll()
        if code is not None:
            raise StartError(
                f"tritonserver could not start: expected it to listen on {endpoints.http_url}, got exit code {code}; "
                f"see its log above."
            )
        if time.monotonic() - told > 5:
            told = time.monotonic()
            _say(f"loading models, {told - start:.0f} s")
        time.sleep(0.1)


def _report_models(repository: Path, endpoints: Endpoints, models: list[str]) -> None:
    """Say of every model whether it answers.

    Raises:
        StartError: None does.
    """
    states = read_states(endpoints.http_url)
    # Of a version that could not be loaded the server gives the reason; of an ensemble over it nothing at all.
    states += [
        ModelState(
            name=name, version="", state="NOT LOADED", reason="a step of it or its configuration failed, see above"
        )
        for name in models
        if name not in {state.name for state in states if state.state != "NOT LOADED"}
    ]
    verdicts = {state: _judge(repository, endpoints, state) for state in states if state.name in models and state.state}
    width = max(len(state.name) for state in verdicts)
    for state, (_, text) in verdicts.items():
        _say(f"  {state.name:<{width}}  {'version ' + state.version if state.version else '-':<11}  {text}")
    if not any(answers for answers, _ in verdicts.values()):
        raise StartError(
            f"no model of {repository} can be served: expected at least one of {', '.join(models)} to load, got none; "
            f"see the log above."
        )


def _judge(repository: Path, endpoints: Endpoints, state: ModelState) -> tuple[bool, str]:
    if not state.ready:
        return False, f"FAILED: {' '.join((state.reason or state.state).split())}"
    try:
        error = check_answer(endpoints.http_url, repository, state)
    except (OSError, ValueError, KeyError) as exc:
        return False, f"FAILED: {exc}"
    return True, "ready" if error is None else f"ready, answers as verified within {error:.1e}"


def _describe(endpoints: Endpoints) -> str:
    port = endpoints.http_port
    return (
        f"serving HTTP on {endpoints.host}:{port}, gRPC on {endpoints.host}:{endpoints.grpc_port}, "
        f"metrics on {endpoints.host}:{endpoints.metrics_port}\n"
        f'Next: python client/infer.py --url localhost:{port} --text "Hello"    (Ctrl-C here stops the server)'
    )


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m server",
        description="Serve a model repository with the real tritonserver until Ctrl-C or SIGTERM.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--repository",
        type=Path,
        default=_CHECKOUT / "model_repository",
        metavar="DIR",
        help="model repository (default: model_repository of this checkout)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--http-port", type=int, default=8000, help="default: %(default)s")
    parser.add_argument("--grpc-port", type=int, default=8001, help="default: %(default)s")
    parser.add_argument("--metrics-port", type=int, default=8002, help="default: %(default)s")
    parser.add_argument("--verbose", action="store_true", help="show the whole log of tritonserver")
    return parser


def _stop(signal_number: int, frame: FrameType | None) -> None:
    raise _Stopped


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
