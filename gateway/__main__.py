"""`python -m gateway`: the command line."""

from typing import TYPE_CHECKING

# As in upstream.py.
if TYPE_CHECKING:
    from client.command.ending import EXIT_UNANSWERED, answer, begin, end_quietly
    from client.command.parser import Parser
else:
    from modelyard.client.command.ending import EXIT_UNANSWERED, answer, begin, end_quietly
    from modelyard.client.command.parser import Parser

if __name__ == "__main__":
    # Loading the rest takes a while, of which nobody wants a traceback.
    begin()

import argparse
import gc
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

# gRPC would write its own account of a failure beside our sentence.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from .errors import GatewayError
from .keys import Keys, add_key
from .locations import PROGRAM, REPOSITORY, SERVE

# As long as the server's own.
_DRAIN_S = 10

_EXAMPLES = f"""
examples:
  {PROGRAM} --server localhost:8001 --port 8080
  {PROGRAM} --server https://models.example:8444 --repository /srv/models --host 0.0.0.0 --keys keys.jsonl
  {PROGRAM} --keys keys.jsonl --add-key alice --requests-per-minute 600 --tokens-per-minute 1000000

Callers need nothing but the address: OpenAI(base_url="http://localhost:8080/v1", api_key="..."). /docs shows every
operation. The file of keys holds hashes alone; --add-key prints the key, once.

exit codes: 0 stopped, 1 could not start (one sentence on stderr), 2 wrong usage,
{EXIT_UNANSWERED} done, but the answer cannot be written
"""


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line, `words` in place of those of this process if given, and return the exit code."""
    parser = _build_parser()
    arguments = parser.parse_args(words)
    limits = {"requests_per_minute": arguments.requests_per_minute, "tokens_per_minute": arguments.tokens_per_minute}
    if arguments.add_key is None and any(limit is not None for limit in limits.values()):
        parser.error("--requests-per-minute and --tokens-per-minute belong to --add-key")
    if arguments.add_key is not None and arguments.keys is None:
        parser.error("--add-key needs --keys, the file that it is added to")
    try:
        if arguments.add_key is not None:
            answer(add_key(arguments.keys, arguments.add_key, limits), done=f"a key of {arguments.add_key} is added")
            return 0
        return serve(arguments)
    except GatewayError as exc:
        _say(f"error: {exc}")
        return 1


def serve(arguments: argparse.Namespace) -> int:
    """Answer until Ctrl-C or SIGTERM, then answer what is in flight.

    Raises:
        GatewayError: It cannot start.
    """
    import uvicorn

    from .connections import KEEP_ALIVE_S, BoundedProtocol, raise_limit
    from .door import Door
    from .tokens import start_threads
    from .upstream import ClientError, Upstream

    start_threads()
    keys = Keys(arguments.keys, _say) if arguments.keys else None
    # pathlib raises where a folder above it may not be entered.
    if not os.path.isdir(arguments.repository):  # noqa: PTH112
        raise GatewayError(
            f"{arguments.repository} is no folder",
            expected="the repository that is served, for its tokenizers and chat templates",
            got="a file" if os.path.exists(arguments.repository) else "nothing that this user may see",  # noqa: PTH110
            remedy="name it with --repository",
        )
    try:
        upstream = Upstream(arguments.server, arguments.repository, arguments.timeout, _say)
    except ClientError as exc:
        raise GatewayError(
            "the server cannot be asked", expected="an address and a time", got=f"'{exc}'", remedy="correct --server"
        ) from exc
    BoundedProtocol.most = raise_limit()
    listener = _listen(arguments.host, arguments.port)
    door = Door(upstream, keys, tuple(arguments.matryoshka), arguments.max_body)
    server = uvicorn.Server(
        uvicorn.Config(
            door,
            loop="uvloop",
            http=BoundedProtocol,
            lifespan="on",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=_DRAIN_S,
        )
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        # uvicorn sets its own while it runs, and hands every signal on to these when it has stopped.
        signal.signal(number, server.handle_exit)
    entry = "with a key" if keys else "without keys"
    _say(f"listening on http://{arguments.host}:{listener.getsockname()[1]} {entry}, asking {upstream.url}")
    # What is there for good need not be looked through again and again.
    gc.collect()
    gc.freeze()
    server.run(sockets=[listener])
    _say("stopped")
    return 0


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=2048)
        listener.setblocking(False)
    except socket.gaierror as exc:
        raise _refuse_address(host, port, exc.strerror or str(exc)) from exc
    except OSError as exc:
        # Without the address, which Python adds to the system's words.
        raise _refuse_address(host, port, os.strerror(exc.errno or 0)) from exc
    # Python's, of what is no port and of a name that cannot be asked for.
    except (OverflowError, UnicodeError) as exc:
        raise _refuse_address(host, port, str(exc)) from exc
    return listener


def _refuse_address(host: str, port: int, reason: str) -> GatewayError:
    return GatewayError(
        f"{host}:{port} cannot be listened on",
        expected="an address of this machine and a free port",
        got=f"'{reason}'",
        remedy="correct --host or --port",
    )


def _build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=PROGRAM,
        description=f"Answer clients of OpenAI's API, and of TEI's, with the models of a running `{SERVE}`.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--server",
        default=os.environ.get("MODELYARD_GRPC_URL", "localhost:8001"),
        metavar="HOST:PORT",
        help="the server's gRPC port; https:// in front of it asks for TLS (default: %(default)s)",
    )
    parser.add_argument(
        "--repository",
        type=Path,
        default=REPOSITORY,
        metavar="DIR",
        help="what the server serves, for its tokenizers and chat templates; it is only read (default: %(default)s)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address it listens on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8080, help="default: %(default)s; 0 takes a free one")
    parser.add_argument(
        "--keys",
        type=Path,
        metavar="FILE",
        help="who may ask, and how much; read again when it changes (default: anyone)",
    )
    parser.add_argument(
        "--add-key",
        metavar="NAME",
        help="add a key to --keys, print it, and end; a running gateway knows it a second later",
    )
    parser.add_argument("--requests-per-minute", type=_count, metavar="N", help="of the new key (default: no limit)")
    parser.add_argument("--tokens-per-minute", type=_count, metavar="N", help="of the new key, read and written")
    parser.add_argument(
        "--timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds for an answer, or a piece (default: %(default)s)",
    )
    parser.add_argument(
        "--max-body", type=_count, default=8 << 20, metavar="BYTES", help="of one request (default: %(default)s)"
    )
    parser.add_argument(
        "--matryoshka",
        action="append",
        default=[],
        metavar="MODEL",
        help="a model trained so that the first values of its vectors are vectors, for `dimensions`; several times",
    )
    return parser


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {text}")
    return number


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(end_quietly(main))
