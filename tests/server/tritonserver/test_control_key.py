"""The key of the control endpoints: who holds it, who cannot read it, and what is closed without it."""

import json
import stat
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tritonclient.grpc
from harness import Published, run
from launcher import Running, running
from tritonclient.utils import InferenceServerException

from server.errors import KeyFileError
from server.tritonserver.control_key import HEADER, open_key

# Method, path and body of everything that changes what the server does or shows another caller's memory.
CLOSED_OVER_HTTP = [
    ("POST", "/v2/repository/index", {}),
    ("POST", "/v2/repository/models/sentence_embedding/load", {}),
    ("POST", "/v2/repository/models/sentence_embedding/load", {"parameters": {"config": "{}"}}),
    ("POST", "/v2/repository/models/sentence_embedding/unload", {}),
    ("GET", "/v2/trace/setting", None),
    ("POST", "/v2/trace/setting", {"trace_level": ["TIMESTAMPS"]}),
    ("POST", "/v2/models/sentence_embedding/trace/setting", {"trace_level": ["TIMESTAMPS"]}),
    ("GET", "/v2/logging", None),
    ("POST", "/v2/logging", {"log_verbose_level": 9}),
    ("GET", "/v2/systemsharedmemory/status", None),
    ("POST", "/v2/systemsharedmemory/region/x/register", {"key": "/x", "offset": 0, "byte_size": 8}),
    ("POST", "/v2/systemsharedmemory/unregister", {}),
    ("GET", "/v2/cudasharedmemory/status", None),
    ("POST", "/v2/cudasharedmemory/unregister", {}),
]

Grpc = tritonclient.grpc.InferenceServerClient
CLOSED_OVER_GRPC: list[tuple[str, Callable[..., object]]] = [
    ("index", lambda client, headers: client.get_model_repository_index(headers=headers)),
    ("load", lambda client, headers: client.load_model("sentence_embedding", headers=headers)),
    ("override", lambda client, headers: client.load_model("sentence_embedding", config="{}", headers=headers)),
    ("unload", lambda client, headers: client.unload_model("sentence_embedding", headers=headers)),
    ("trace", lambda client, headers: client.get_trace_settings(headers=headers)),
    ("set trace", lambda client, headers: client.update_trace_settings(settings={}, headers=headers)),
    ("logging", lambda client, headers: client.get_log_settings(headers=headers)),
    ("set logging", lambda client, headers: client.update_log_settings({"log_info": True}, headers=headers)),
    ("memory", lambda client, headers: client.get_system_shared_memory_status(headers=headers)),
    ("register", lambda client, headers: client.register_system_shared_memory("x", "/x", 8, headers=headers)),
    ("unregister", lambda client, headers: client.unregister_system_shared_memory(headers=headers)),
    ("cuda memory", lambda client, headers: client.get_cuda_shared_memory_status(headers=headers)),
]

OPEN_OVER_HTTP = [
    "/v2",
    "/v2/health/live",
    "/v2/models/sentence_embedding",
    "/v2/models/sentence_embedding/config",
    "/v2/models/stats",
]


@pytest.fixture(scope="module")
def closed_server(published: Published, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Path]]:
    key_file = tmp_path_factory.mktemp("key") / "control.key"
    with running(published.repository, "--key-file", str(key_file), "--verbose") as server:
        server.read_until("serving HTTP")
        server.follow()
        yield server, key_file


def read_value(key_file: Path) -> str:
    return key_file.read_text().split()[1]


def ask(server: Running, method: str, path: str, body: object, headers: dict[str, str]) -> int:
    data = None if body is None else json.dumps(body).encode()
    url = f"http://127.0.0.1:{server.http}{path}"
    request = urllib.request.Request(url, data=data, headers=headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return int(response.status)
    except urllib.error.HTTPError as exc:
        return exc.code


@pytest.mark.parametrize("headers", [{}, {HEADER: "0" * 64}, {HEADER: ""}], ids=["no key", "a wrong key", "empty"])
@pytest.mark.parametrize(("method", "path", "body"), CLOSED_OVER_HTTP, ids=[f"{m} {p}" for m, p, _ in CLOSED_OVER_HTTP])
def test_control_over_http_is_refused_without_the_key(
    closed_server: tuple[Running, Path], method: str, path: str, body: object, headers: dict[str, str]
) -> None:
    assert ask(closed_server[0], method, path, body, headers) == 403


@pytest.mark.parametrize("value", [None, "0" * 64, ""], ids=["no key", "a wrong key", "empty"])
@pytest.mark.parametrize(("name", "call"), CLOSED_OVER_GRPC, ids=[name for name, _ in CLOSED_OVER_GRPC])
def test_control_over_grpc_is_refused_without_the_key(
    closed_server: tuple[Running, Path], name: str, call: Callable[..., object], value: str | None
) -> None:
    headers = None if value is None else {f"triton-grpc-protocol-{HEADER}": value}
    refused = pytest.raises(InferenceServerException, match="This protocol is restricted")
    with Grpc(f"127.0.0.1:{closed_server[0].grpc}") as client, refused as refusal:
        call(client, headers)
    assert "UNAVAILABLE" in str(refusal.value.status())


def test_the_key_opens_what_is_closed(closed_server: tuple[Running, Path]) -> None:
    server, key_file = closed_server
    assert ask(server, "POST", "/v2/repository/index", {}, {HEADER: read_value(key_file)}) == 200
    with Grpc(f"127.0.0.1:{server.grpc}") as client:
        headers = {f"triton-grpc-protocol-{HEADER}": read_value(key_file)}
        assert len(client.get_model_repository_index(headers=headers).models) == 3


@pytest.mark.parametrize("path", OPEN_OVER_HTTP)
def test_what_clients_need_stays_open(closed_server: tuple[Running, Path], path: str) -> None:
    assert ask(closed_server[0], "GET", path, None, {}) == 200


def test_the_key_is_in_no_log_and_no_command_line(closed_server: tuple[Running, Path]) -> None:
    server, key_file = closed_server
    value = read_value(key_file)
    assert any("--http-restricted" in line or "http_server.cc" in line for line in server.lines), "nothing was logged"
    assert not any(value in line for line in server.lines)
    for process in (server.process.pid, server.tritonserver):
        command = Path(f"/proc/{process}/cmdline").read_bytes()
        assert b"--key-file" in command or b"--http-restricted-api" in command
        assert value.encode() not in command
        assert value.encode() not in Path(f"/proc/{process}/environ").read_bytes()


def test_the_key_file_is_private_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "new" / "control.key"
    key = open_key(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert open_key(path) == key
    assert key.value not in repr(key)
    assert [entry.name for entry in path.parent.iterdir()] == ["control.key"]


def test_a_key_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "control.key"
    open_key(path)
    path.chmod(0o640)
    with pytest.raises(KeyFileError, match=r"is open to others: expected mode 600 and user \d+, got mode 640"):
        open_key(path)


def test_a_key_file_without_a_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "control.key"
    path.write_text("secret\n")
    path.chmod(0o600)
    with pytest.raises(KeyFileError, match=r"holds no control key: expected one line 'modelyard-key: '"):
        open_key(path)
    done = run("-m", "server", "--key-file", str(tmp_path), "--repository", str(tmp_path))
    assert done.code == 1
    assert done.err.count("\n") == 1
