"""`python -m server`: the command line, and the container's entry point."""

from .command.ending import EXIT_UNANSWERED, answer, begin, end_quietly

if __name__ == "__main__":
    # Loading the rest takes a while, of which nobody wants a traceback.
    begin()

import argparse
import contextlib
import errno
import math
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from .command.parser import Parser
from .doctor import examine, render
from .endpoints import Endpoints, check_ports_free
from .errors import ServerError, ShortageError
from .following.check import Checked, check_ensembles
from .following.models import check_variant, list_models, wait_for_model
from .limits import check_address_space, check_open_files, check_temporary_folder, check_threads, raise_limits
from .locations import BACKENDS, KEY_FILE, PROGRAM, REPOSITORY, name_command
from .log import Log
from .status import Status
from .status_port import serve_status
from .supervisor import Supervisor
from .tritonserver.control_key import open_key
from .tritonserver.installation import Installation, assemble_backends, find_installation, link_interpreter
from .tritonserver.orphans import PREFIX, own, remove_orphans
from .tritonserver.passed_options import check_passed_options
from .tritonserver.settings import Settings

_DESCRIPTION = """
Serve a model repository with the real tritonserver. Without a command, it serves.
"""

_EXAMPLES = f"""
examples:
  {name_command("serve")}
  {name_command("serve")} --repository /srv/models --host 0.0.0.0
  {name_command("check")} --repository /srv/models
  {name_command("doctor")} --json

`{name_command("COMMAND")} --help` shows the options of each, and its exit codes.
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
    arguments = _parse(sys.argv[1:])
    try:
        code: int = arguments.run(arguments)
        return code
    except ServerError as exc:
        _say(f"error: {exc}")
        return exc.exit_code


def serve(arguments: argparse.Namespace) -> int:
    """Start tritonserver, tell when it answers, keep it alive, and stay until it is stopped.

    Raises:
        ServerError: It cannot start, or no model can be served, or it would not stay alive.
    """
    stops, endpoints = StopSignals(), _read_endpoints(arguments)
    check_passed_options(arguments.passed_options)
    installation = find_installation()
    if not arguments.wait:
        list_models(arguments.repository)
        check_variant(arguments.repository, arguments.model_config_name)
    key = open_key(arguments.key_file)
    check_open_files()
    check_threads()
    check_address_space()
    check_temporary_folder(holds_programs=not installation.is_assembled)
    raise_limits()
    for told in remove_orphans():
        _say(told)
    check_ports_free(endpoints)
    status, log = Status(follows=arguments.follow == "on"), Log()
    with contextlib.closing(log), contextlib.ExitStack() as stack:
        stack.callback(serve_status(status, endpoints.host, endpoints.status_port))
        if arguments.wait and not wait_for_model(arguments.repository, log.say, stops):
            log.say("stopped")
            return 0
        status.expect(list_models(arguments.repository))
        directory = stack.enter_context(_make_run_directory(installation))
        log.say(f"starting {installation.executable} ({installation.source}) on {arguments.repository}")
        settings = Settings(
            installation=installation,
            repository=arguments.repository,
            endpoints=endpoints,
            key=key,
            run_directory=directory,
            verbose=arguments.verbose,
            passed_options=tuple(arguments.passed_options),
            follows=arguments.follow == "on",
            variant=arguments.model_config_name,
        )
        answered = Supervisor(settings, status, stops, log).run()
        log.say("stopped" if answered else "stopped before everything in flight was answered")
    return 0 if answered else _EXIT_UNANSWERED


@contextlib.contextmanager
def _make_run_directory(installation: Installation) -> Iterator[Path]:
    """Make a folder with the assembled `backends`, and links to this interpreter, for as long as the block takes.

    Raises:
        ShortageError: There is no room for it.
    """
    with contextlib.ExitStack() as stack:
        try:
            # What cannot be removed in the end is no reason to end otherwise than well.
            temporary = tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True)
            directory = Path(stack.enter_context(temporary))
            stack.enter_context(own(directory))
            backends = directory / "backends"
            backends.mkdir()
            assemble_backends(installation, BACKENDS, backends)
            link_interpreter(directory / "python")
        except OSError as exc:
            # Of a folder that could not be copied, the reasons are told file by file.
            reason = exc.args[0][0][2] if isinstance(exc, shutil.Error) else exc.strerror
            raise ShortageError(
                f"no temporary folder can be made in {os.environ.get('TMPDIR', '/tmp')}",
                expected="a folder that this user may write, with 4 MiB free",
                got=f"'{reason}'",
                remedy="lift the limit on the size of a file (ulimit -f)"
                if exc.errno == errno.EFBIG
                else "make room, or name another folder in the environment variable TMPDIR",
            ) from exc
        yield directory


def check(arguments: argparse.Namespace) -> int:
    """Ask the running server for the verified answer of every ensemble.

    Raises:
        CheckError: It does not give it, or stays behind the repository.
    """
    endpoints = _read_endpoints(arguments)
    found = check_ensembles(
        endpoints.http_url, arguments.repository, endpoints.status_url, any_version=arguments.any_version
    )
    if not any(checked.served for checked in found.values()):
        _say("ready; no model has a recorded answer to be asked for")
    for name, checked in found.items():
        if not checked.served:
            _say(_describe_absent(name, checked))
            continue
        is_verified = not math.isnan(checked.error)
        answers = f"{name} answers as verified within {checked.error:.1e}" if is_verified else f"{name} is ready"
        if checked.disagreement:
            _say(f"warning: {answers}, but {checked.disagreement}")
            continue
        changing = f"; {checked.doubt}" if checked.doubt else f", which {checked.waits or 'is being rolled out'}"
        changing = "" if checked.served == checked.active else changing
        _say(f"{answers}; version {checked.served} is served, version {checked.active} is active{changing}")
    return 0


def _describe_absent(name: str, checked: Checked) -> str:
    if checked.disagreement:
        return f"warning: {name} does not answer: {checked.disagreement}"
    return f"{name} {checked.waits or 'is being loaded'}; no version is served, version {checked.active} is active"


def diagnose(arguments: argparse.Namespace) -> int:
    """Print what this machine lacks to serve; return 1 if that keeps it from serving."""
    findings = examine(arguments.repository, _read_endpoints(arguments))
    answer(render(findings, as_json=arguments.json))
    return int(any(finding.verdict == "broken" for finding in findings))


def _parse(words: list[str]) -> argparse.Namespace:
    """Return what the command line says; options without a command are those of `serve`."""
    if not words or (words[0].startswith("-") and words[0] not in ("-h", "--help")):
        words = ["serve", *words]
    end = words.index("--") if "--" in words else len(words)
    arguments = _build_parser().parse_args(words[:end])
    arguments.passed_options = words[end + 1 :]
    return arguments


def _build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=PROGRAM,
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_serve(commands)
    _add_check(commands)
    _add_doctor(commands)
    return parser


if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction[Parser]


def _add_serve(commands: "_Commands") -> None:
    parser = _add_command(
        commands,
        "serve",
        serve,
        help="serve until Ctrl-C or SIGTERM",
        description="Serve a model repository until Ctrl-C or SIGTERM. Options after -- are handed on to tritonserver.",
        examples=(
            "",
            "--repository /srv/models --host 0.0.0.0",
            "--http-port 9000 --grpc-port 9001 --metrics-port 9002 --status-port 9003",
            "--model-config-name staging",
            "-- --trace-config mode=opentelemetry --trace-config opentelemetry,url=localhost:4318/v1/traces",
            "-- --cache-config local,size=104857600 --metrics-config summary_latencies=true",
        ),
        exit_codes={
            0: "stopped, and everything in flight was answered",
            1: "could not start",
            2: "wrong usage",
            3: "gave up on a tritonserver that died again and again",
            _EXIT_UNANSWERED: "stopped before everything in flight was answered",
        },
    )
    parser.add_argument(
        "--key-file",
        type=Path,
        default=KEY_FILE,
        metavar="FILE",
        help="header that opens the control endpoints; made with mode 600 (default: %(default)s)",
    )
    parser.add_argument(
        "--follow",
        choices=("on", "off"),
        default="on",
        help="whether what becomes active in the repository is served without a restart (default: %(default)s)",
    )
    parser.add_argument(
        "--model-config-name",
        default="",
        metavar="NAME",
        help="serve each version as table configs.NAME of modelyard.toml said when it was exported, if it did",
    )
    parser.add_argument(
        "--wait", action="store_true", help="wait for a first model where the repository holds none, instead of ending"
    )
    parser.add_argument("--verbose", action="store_true", help="show the whole log of tritonserver")


def _add_check(commands: "_Commands") -> None:
    parser = _add_command(
        commands,
        "check",
        check,
        help="ask a running server for the answers that were verified",
        description="Ask a running server for the answers that were verified, and whether the active versions answer.",
        examples=("", "--repository /srv/models --http-port 9000 --status-port 9003", "--any-version"),
        exit_codes={
            0: "every ensemble answers as verified, from its active version or one that is just being replaced; "
            "one that is just being loaded need not, if another answers",
            1: "one does not, or stays at another version than the active one without --any-version",
            2: "wrong usage",
        },
    )
    parser.add_argument(
        "--any-version",
        action="store_true",
        help="only say so where another version than the active one answers, or none while other models do: for the "
        "health check of a container, which is not to be restarted because a rollout failed",
    )


def _add_doctor(commands: "_Commands") -> None:
    parser = _add_command(
        commands,
        "doctor",
        diagnose,
        help="tell what this machine lacks to serve",
        description="Tell what this machine lacks to serve, each with a verdict and a remedy.",
        examples=("", "--repository /srv/models --json"),
        exit_codes={
            0: "it can serve",
            1: "it cannot",
            2: "wrong usage",
            EXIT_UNANSWERED: "the answer cannot be written",
        },
    )
    parser.add_argument("--json", action="store_true", help="as JSON")


def _add_command(
    commands: "_Commands",
    name: str,
    run: Callable[[argparse.Namespace], int],
    *,
    help: str,  # noqa: A002
    description: str,
    examples: tuple[str, ...],
    exit_codes: dict[int, str],
) -> argparse.ArgumentParser:
    """Add a command with the options that all of them share: what is served, and where."""
    lines = ["examples:", *(f"  {name_command(name)} {example}".rstrip() for example in examples)]
    lines += ["", "exit codes:", *(f"  {code}  {meaning}" for code, meaning in exit_codes.items())]
    parser = commands.add_parser(
        name,
        help=help,
        description=description,
        epilog="\n".join(lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "--repository",
        type=Path,
        default=REPOSITORY,
        metavar="DIR",
        help="model repository (default: %(default)s)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address it listens on (default: %(default)s)")
    parser.add_argument("--http-port", type=int, default=8000, help="default: %(default)s")
    parser.add_argument("--grpc-port", type=int, default=8001, help="default: %(default)s")
    parser.add_argument("--metrics-port", type=int, default=8002, help="tritonserver's metrics (default: %(default)s)")
    parser.add_argument(
        "--status-port", type=int, default=8003, help="/ready, and metrics of this launcher (default: %(default)s)"
    )
    return parser


def _read_endpoints(arguments: argparse.Namespace) -> Endpoints:
    return Endpoints(
        host=arguments.host,
        http_port=arguments.http_port,
        grpc_port=arguments.grpc_port,
        metrics_port=arguments.metrics_port,
        status_port=arguments.status_port,
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(end_quietly(main))
