"""A real nginx in front of servers, for the tests that need one."""

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher import Running, find_ports

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")

# Every request goes to the next of the servers in turn, over connections that are kept.
_BALANCING = """
worker_processes 1;
pid nginx.pid;
error_log stderr;
events {{ worker_connections 256; }}
http {{
    access_log off;
    client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path fastcgi; uwsgi_temp_path uwsgi;
    scgi_temp_path scgi;
    upstream http_servers {{ {http_servers} keepalive 16; }}
    upstream grpc_servers {{ {grpc_servers} keepalive 16; }}
    server {{
        listen 127.0.0.1:{http};
        location / {{ proxy_pass http://http_servers; proxy_http_version 1.1; proxy_set_header Connection ""; }}
    }}
    server {{
        listen 127.0.0.1:{grpc} http2;
        location / {{ grpc_pass grpc://grpc_servers; grpc_read_timeout 1h; grpc_send_timeout 1h; }}
    }}
}}
"""


@dataclass(frozen=True)
class Balancer:
    """The ports that answer for several servers."""

    http: int
    grpc: int


@contextlib.contextmanager
def running_nginx(folder: Path, port: int) -> Iterator[None]:
    """Run nginx with the configuration in `folder` and wait until it listens on `port`."""
    assert NGINX is not None
    # As root it would change to a user who may not enter this folder.
    directives = "daemon off;" + (" user root;" if os.geteuid() == 0 else "")
    nginx = subprocess.Popen([NGINX, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-g", directives])
    try:
        _wait_for_port(port)
        yield
    finally:
        nginx.terminate()
        nginx.wait(timeout=10)


@contextlib.contextmanager
def balancing(servers: Sequence[Running]) -> Iterator[Balancer]:
    """Stand in front of several servers, over HTTP and gRPC."""
    http, grpc = find_ports(2)
    with tempfile.TemporaryDirectory(prefix="modelyard-nginx-") as name:
        text = _BALANCING.format(
            http=http,
            grpc=grpc,
            http_servers=" ".join(f"server 127.0.0.1:{server.http};" for server in servers),
            grpc_servers=" ".join(f"server 127.0.0.1:{server.grpc};" for server in servers),
        )
        Path(name, "nginx.conf").write_text(text)
        with running_nginx(Path(name), http):
            yield Balancer(http, grpc)


def _wait_for_port(port: int) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    raise AssertionError("nginx does not listen")
