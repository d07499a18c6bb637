"""Where the server listens."""

import errno
import socket
from dataclasses import dataclass

from .errors import HostError, PortTakenError, ServerError, UsageError

# What bind answers where it is the address that is not this machine's.
_FOREIGN = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL, errno.ENODEV}


@dataclass(frozen=True, kw_only=True)
class Endpoints:
    """Where the server listens.

    Raises:
        UsageError: A port is none, naming its option.
    """

    host: str
    http_port: int
    grpc_port: int
    metrics_port: int
    status_port: int

    def __post_init__(self) -> None:
        for option, port in self.ports.items():
            # 0 stands for any free port, and nobody would know which one tritonserver was given.
            if not 0 < port < 1 << 16:
                raise UsageError(
                    f"{option} is no port",
                    expected="a number from 1 to 65535",
                    got=f"{port}",
                    remedy="correct it",
                )

    @property
    def ports(self) -> dict[str, int]:
        """Option → port."""
        return {
            "--http-port": self.http_port,
            "--grpc-port": self.grpc_port,
            "--metrics-port": self.metrics_port,
            "--status-port": self.status_port,
        }

    @property
    def bracketed_host(self) -> str:
        """The host as URLs and gRPC write it, where a port follows."""
        return f"[{self.host}]" if ":" in self.host else self.host

    @property
    def libevent_host(self) -> str:
        """The host as tritonserver's HTTP and metrics ports take it: libevhtp tells an address of IPv6 by a prefix."""
        return f"ipv6:{self.host}" if ":" in self.host else self.host

    @property
    def told_url(self) -> str:
        """Host and HTTP port as a person on this machine would write them."""
        host = "localhost" if self.host in ("127.0.0.1", "0.0.0.0") else self._local_host
        return f"{host}:{self.http_port}"

    @property
    def http_url(self) -> str:
        """The URL under which a program on this machine reaches the HTTP port."""
        return f"http://{self._local_host}:{self.http_port}"

    @property
    def grpc_address(self) -> tuple[str, int]:
        """Host and port of gRPC, likewise."""
        return self._local_host.strip("[]"), self.grpc_port

    @property
    def metrics_url(self) -> str:
        """The URL of the metrics port, likewise."""
        return f"http://{self._local_host}:{self.metrics_port}"

    @property
    def status_url(self) -> str:
        """The URL of the launcher's own port, likewise."""
        return f"http://{self._local_host}:{self.status_port}"

    @property
    def _local_host(self) -> str:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"[{host}]" if ":" in host else host


def check_ports_free(endpoints: Endpoints) -> None:
    """Refuse to start where another program listens, or where no four ports can be listened on.

    Raises:
        UsageError: Two options name one port.
        HostError: The host is no address of this machine.
        PortTakenError: Naming the port and its option.
    """
    _check_ports_differ(endpoints)
    if not endpoints.host:
        # The system takes it for every address, tritonserver for none.
        raise _refuse_host("an empty --host", "nothing")
    for option, port in endpoints.ports.items():
        family = socket.AF_INET6 if ":" in endpoints.host else socket.AF_INET
        try:
            with socket.socket(family) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((endpoints.host, port))
        except (OSError, TypeError) as exc:
            raise _explain(exc, endpoints.host, option, port) from exc


def _check_ports_differ(endpoints: Endpoints) -> None:
    options = dict[int, str]()
    for option, port in endpoints.ports.items():
        if port in options:
            raise UsageError(
                f"{options[port]} and {option} name one port",
                expected="four different ones",
                got=f"{port} for both",
                remedy=f"pass another {option}",
            )
        options[port] = option


def _explain(error: OSError | TypeError, host: str, option: str, port: int) -> ServerError:
    """Return the refusal that names what is to be changed: the host, or the port."""
    # Python's, of a name that cannot be asked for.
    if isinstance(error, TypeError):
        return _refuse_host(host, f"'{error}'")
    if isinstance(error, socket.gaierror) or error.errno in _FOREIGN:
        return _refuse_host(host, f"'{error.strerror}'")
    expected, remedy = "it to be free", f"stop the program that listens there or pass another {option}"
    if error.errno == errno.EACCES:
        expected, remedy = "one that this user may listen on", f"pass another {option}, from 1024 on"
    return PortTakenError(
        f"port {port} on {host} cannot be used", expected=expected, got=f"'{error.strerror}'", remedy=remedy
    )


def _refuse_host(host: str, reason: str) -> HostError:
    return HostError(
        f"nothing can listen on {host}",
        expected="an address or a name of this machine",
        got=reason,
        remedy="correct --host (127.0.0.1 for this machine alone, 0.0.0.0 for whoever reaches it)",
    )
