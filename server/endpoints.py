"""Where the server listens."""

import socket
from dataclasses import dataclass

from .errors import PortTakenError


@dataclass(frozen=True, kw_only=True)
class Endpoints:
    """Where the server listens."""

    host: str
    http_port: int
    grpc_port: int
    metrics_port: int
    status_port: int

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
    """Refuse to start where another program listens.

    Raises:
        PortTakenError: Naming the port and its option.
    """
    ports = {
        "--http-port": endpoints.http_port,
        "--grpc-port": endpoints.grpc_port,
        "--metrics-port": endpoints.metrics_port,
        "--status-port": endpoints.status_port,
    }
    for option, port in ports.items():
        family = socket.AF_INET6 if ":" in endpoints.host else socket.AF_INET
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((endpoints.host, port))
            except OSError as exc:
                raise PortTakenError(
                    f"port {port} on {endpoints.host} cannot be used",
                    expected="it to be free",
                    got=f"'{exc.strerror}'",
                    remedy=f"stop the program that listens there or pass another {option}",
                ) from exc
