"""TLS and tokens in front of the server: the nginx of `compose.yaml --profile tls`, with a certificate of today."""

import contextlib
import gzip
import json
import re
import resource
import shlex
import shutil
import socket
import ssl
import struct
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from http import client as http_client
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import StreamEnded, StreamReset
from harness import CHECKOUT, Finished, Published, run
from launcher import Running, find_ports, running
from nginx import NGINX, running_nginx
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import InferenceServerException

TOKEN = "4f1c" * 16

pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is not installed; `apt-get install nginx-light`")


@dataclass
class Proxy:
    server: Running
    http: int
    grpc: int
    folder: Path
    key_file: Path

    def ask(self, path: str, body: Any = None, **headers: str) -> int:
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        request = urllib.request.Request(
            f"https://localhost:{self.http}{path}",
            data=data,
            headers={name.replace("_", "-"): value for name, value in headers.items()},
        )
        context = ssl.create_default_context(cafile=self.folder / "certificate.pem")
        try:
            with urllib.request.urlopen(request, context=context, timeout=60) as response:
                return int(response.status)
        except urllib.error.HTTPError as exc:
            return exc.code


@pytest.fixture(scope="module")
def proxy(published: Published, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    folder = tmp_path_factory.mktemp("tls")
    key_file = folder / "control.key"
    http, grpc = find_ports(2)
    with running(published.repository, "--key-file", str(key_file)) as server:
        server.read_until("serving HTTP")
        text = (CHECKOUT / "docker" / "tls" / "nginx.conf").read_text()
        for old, new in (
            ("server:8000", f"127.0.0.1:{server.http}"),
            ("server:8001", f"127.0.0.1:{server.grpc}"),
            ("listen 8443", f"listen 127.0.0.1:{http}"),
            ("listen 8444", f"listen 127.0.0.1:{grpc}"),
            ("/tmp/nginx", str(folder / "nginx")),
            ("/dev/stdout", str(folder / "access.log")),
        ):
            assert old in text
            text = text.replace(old, new)
        (folder / "nginx.conf").write_text(text)
        (folder / "tokens.conf").write_text(f'"~^Bearer {TOKEN}$" tester;\n')
        make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
        make += ["-addext", "subjectAltName=DNS:localhost", "-keyout", "key.pem", "-out", "certificate.pem"]
        subprocess.run(make, cwd=folder, check=True, capture_output=True)
        with running_nginx(folder, http):
            yield Proxy(server, http, grpc, folder, key_file)


GOOD = {"inputs": [{"name": "TEXT", "datatype": "BYTES", "shape": [1, 1], "data": ["Hello"]}]}
INFER = "/v2/models/sentence_embedding/infer"


def test_a_caller_with_a_token_is_answered_over_http(proxy: Proxy) -> None:
    assert proxy.ask(INFER, GOOD, Authorization=f"Bearer {TOKEN}") == 200
    assert proxy.ask("/v2/models/sentence_embedding", Authorization=f"Bearer {TOKEN}") == 200


@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": "Bearer x"}, {"Authorization": TOKEN}, {"Authorization": f"Bearer {TOKEN.upper()}"}],
)
def test_a_stranger_is_not(proxy: Proxy, headers: dict[str, str]) -> None:
    assert proxy.ask(INFER, GOOD, **headers) == 401


def test_nobody_controls_the_server_from_outside_not_even_with_the_key(proxy: Proxy) -> None:
    key = proxy.key_file.read_text().split()[1]
    headers = {"Authorization": f"Bearer {TOKEN}", "modelyard_key": key}
    for path in ("/v2/repository/index", "/v2/logging", "/v2/models/sentence_embedding/trace/setting"):
        assert proxy.ask(path, {}, **headers) == 403
    # To nginx these are paths of a model, to whoever decodes them otherwise the index.
    for path in (
        "/v2/repository/..%2fmodels/index",
        "/v2/models/..%2Frepository/index",
        "/v2/models/../repository/index",
    ):
        assert proxy.ask(path, {}, **headers) == 400


def test_a_model_is_asked_by_its_friendlier_route(proxy: Proxy) -> None:
    path = "/v2/models/sentence_embedding/generate"
    assert proxy.ask(path, {"TEXT": "Hello"}, Authorization=f"Bearer {TOKEN}") == 200
    # This one is of models that answer in several parts.
    assert proxy.ask(f"{path}_stream", {"TEXT": "Hello"}, Authorization=f"Bearer {TOKEN}") == 200


def test_a_packed_body_is_refused_whatever_it_unpacks_to(proxy: Proxy) -> None:
    packed = gzip.compress(json.dumps(GOOD).encode())
    headers = {"Authorization": f"Bearer {TOKEN}"}
    for encoding in ("gzip", "deflate", "GZIP", "identity, gzip"):
        assert proxy.ask(INFER, packed, **headers, Content_Encoding=encoding) == 415
    assert proxy.ask(INFER, GOOD, **headers, Content_Encoding="identity") == 200


def pack(texts: list[bytes]) -> tuple[bytes, bytes]:
    """Return the JSON and the tensors of a request for `texts` in binary."""
    tensors = b"".join(struct.pack("<I", len(text)) + text for text in texts)
    parameters = {"binary_data_size": len(tensors)}
    said = {"name": "TEXT", "datatype": "BYTES", "shape": [len(texts), 1], "parameters": parameters}
    return json.dumps({"inputs": [said]}).encode(), tensors


def test_the_largest_good_request_passes(proxy: Proxy) -> None:
    head, tensors = pack([b"A cat sleeps. " * 2_300] * 32)
    headers = {"Authorization": f"Bearer {TOKEN}", "Inference_Header_Content_Length": str(len(head))}
    assert proxy.ask(INFER, head + tensors, **headers) == 200
    # As its own length says, and as many clients send what they make up as they go.
    assert proxy.ask(INFER, iter([head, tensors]), **headers) == 200


def test_an_address_has_few_requests_at_once_that_are_dear_to_tokenise(proxy: Proxy) -> None:
    def ask(head: bytes, tensors: bytes, *, chunks: bool = False) -> int:
        headers = {"Authorization": f"Bearer {TOKEN}", "Inference_Header_Content_Length": str(len(head))}
        return proxy.ask(INFER, iter([head, tensors]) if chunks else head + tensors, **headers)

    # Of the longer kind, two at once; of the other, which is that of most pictures, eight.
    longest, long = pack([b"x" * 128_000] * 4), pack([b"x" * 128_000] * 3)
    with ThreadPoolExecutor(12) as pool:
        assert {*pool.map(lambda _: ask(*longest), range(24))} == {200, 503}
        assert {*pool.map(lambda _: ask(*longest, chunks=True), range(24))} == {200, 503}
        assert {*pool.map(lambda _: ask(*long), range(24))} == {200, 503}
    with ThreadPoolExecutor(6) as pool:
        assert {*pool.map(lambda _: ask(*long), range(12))} == {200}


def test_json_of_more_parameters_than_can_be_looked_up_is_refused(proxy: Proxy) -> None:
    token = {"Authorization": f"Bearer {TOKEN}"}
    many = {f"k{number}": number for number in range(5_000)}
    more = many | {f"l{number}": number for number in range(5_000)}
    generate = f"{INFER.rpartition('/')[0]}/generate"
    for path, few, body in (
        (INFER, GOOD | {"parameters": many}, GOOD | {"parameters": more}),
        (generate, {"TEXT": "Hello"} | many, {"TEXT": "Hello"} | more),
        (f"{generate}_stream", {"TEXT": "Hello"} | many, {"TEXT": "Hello"} | more),
    ):
        assert proxy.ask(path, few, **token) == 200
        data = json.dumps(body).encode()
        assert proxy.ask(path, data, **token) == 413
        assert proxy.ask(path, iter([data]), **token) == 413
        # A length of the JSON part that is none, or longer than it may be.
        for length in (str(len(data)), "", "x", "-1", "0x10", f"000{len(data)}"):
            assert proxy.ask(path, data, **token, Inference_Header_Content_Length=length) == 413
    # Where there is no such part, the header says nothing.
    assert proxy.ask(generate, data, **token, Inference_Header_Content_Length="10") == 413


def test_an_address_has_few_requests_at_once_that_are_dear_to_read(proxy: Proxy) -> None:
    token = {"Authorization": f"Bearer {TOKEN}"}
    dear = json.dumps(GOOD | {"parameters": {f"{number:x}": 1 for number in range(9_000)}}).encode()
    assert len(dear) < 100_000
    with ThreadPoolExecutor(12) as pool:
        told = [*pool.map(lambda _: proxy.ask(INFER, dear, **token), range(24))]
        assert {*told} == {200, 503}
        # As many others as there may be connections pass.
        assert {*pool.map(lambda _: proxy.ask(INFER, GOOD, **token), range(24))} == {200}


@pytest.fixture
def enough_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_callers_pass_strangers_who_begin_to_connect_and_wait(proxy: Proxy, enough_files: None) -> None:
    with contextlib.ExitStack() as held:
        for _ in range(4_000):
            address = ("127.0.0.1", proxy.http)
            stranger = held.enter_context(socket.create_connection(address, 10, source_address=("127.0.0.2", 0)))
            stranger.sendall(b"\x16\x03")
        told = [proxy.ask(INFER, GOOD, Authorization=f"Bearer {TOKEN}") for _ in range(20)]
    assert {*told} == {200}


def test_a_body_beyond_the_limit_is_refused_before_it_arrives(proxy: Proxy) -> None:
    body = GOOD | {"padding": "x" * 35_000_000}
    try:
        assert proxy.ask(INFER, body, Authorization=f"Bearer {TOKEN}") == 413
    # It may hang up while we still send.
    except urllib.error.URLError as exc:
        assert isinstance(exc.reason, ConnectionError | ssl.SSLError), exc


def test_grpc_takes_the_same_tokens(proxy: Proxy) -> None:
    tensor = tritonclient.grpc.InferInput("TEXT", [1, 1], "BYTES")
    tensor.set_data_from_numpy(np.array([["Hello"]], dtype=np.object_))
    certificate = str(proxy.folder / "certificate.pem")
    url = f"localhost:{proxy.grpc}"
    with tritonclient.grpc.InferenceServerClient(url, ssl=True, root_certificates=certificate) as client:
        headers = {"authorization": f"Bearer {TOKEN}"}
        answer = client.infer("sentence_embedding", [tensor], headers=headers)
        assert answer.as_numpy("EMBEDDING").shape == (1, 384)
        with pytest.raises(InferenceServerException, match="UNAUTHENTICATED"):
            client.infer("sentence_embedding", [tensor])
        with pytest.raises(InferenceServerException, match="415"):
            client.infer("sentence_embedding", [tensor], headers=headers, compression_algorithm="gzip")
        key = proxy.key_file.read_text().split()[1]
        with pytest.raises(InferenceServerException, match="PERMISSION_DENIED"):
            client.get_model_repository_index(headers=headers | {"triton-grpc-protocol-modelyard-key": key})


def test_without_its_grpc_server_the_proxy_answers_over_http(proxy: Proxy, tmp_path: Path) -> None:
    text = (proxy.folder / "nginx.conf").read_text()
    (grpc_server,) = re.findall(
        rf"^    server {{\n +listen 127.0.0.1:{proxy.grpc} .*?^    }}\n", text, re.DOTALL | re.MULTILINE
    )
    (http,) = find_ports(1)
    text = text.replace(grpc_server, "").replace(f"127.0.0.1:{proxy.http} ", f"127.0.0.1:{http} ")
    (tmp_path / "nginx.conf").write_text(text.replace(str(proxy.folder), str(tmp_path)))
    for name in ("certificate.pem", "key.pem", "tokens.conf"):
        shutil.copy(proxy.folder / name, tmp_path)
    with running_nginx(tmp_path, http):
        assert replace(proxy, http=http).ask(INFER, GOOD, Authorization=f"Bearer {TOKEN}") == 200


def test_a_packed_message_is_refused_whatever_else_its_headers_say(proxy: Proxy) -> None:
    message = pb.ModelInferRequest(model_name="sentence_embedding")
    message.inputs.add(name="TEXT", datatype="BYTES", shape=[1, 1]).contents.bytes_contents.append(b"Hello")
    packed = gzip.compress(message.SerializeToString())
    context = ssl.create_default_context(cafile=proxy.folder / "certificate.pem")
    context.set_alpn_protocols(["h2"])
    for encodings, status in ((["gzip"], "415"), (["identity", "gzip"], "200"), (["iden", "gzip"], "415")):
        http2 = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        http2.initiate_connection()
        fields = [(":method", "POST"), (":scheme", "https"), (":authority", "localhost")]
        fields += [(":path", "/inference.GRPCInferenceService/ModelInfer"), ("content-type", "application/grpc")]
        fields += [("te", "trailers"), ("authorization", f"Bearer {TOKEN}")]
        http2.send_headers(1, fields + [("grpc-encoding", encoding) for encoding in encodings])
        http2.send_data(1, struct.pack(">BI", 1, len(packed)) + packed, end_stream=True)
        told: dict[str, str] = {}
        with (
            socket.create_connection(("127.0.0.1", proxy.grpc), timeout=60) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as connection,
        ):
            connection.sendall(http2.data_to_send())
            ended = False
            while not ended:
                for event in http2.receive_data(connection.recv(1 << 16)):
                    told |= dict(getattr(event, "headers", None) or [])
                    ended = ended or isinstance(event, StreamEnded | StreamReset)
                connection.sendall(http2.data_to_send())
        assert told[":status"] == status
        # What is packed in a way that nobody named is read by nobody.
        assert told.get("grpc-status", "") != "0"


def test_no_token_reaches_a_log(proxy: Proxy) -> None:
    proxy.ask(INFER, GOOD, Authorization=f"Bearer {TOKEN}")
    log = (proxy.folder / "access.log").read_text()
    assert "tester" in log
    assert TOKEN not in log


def ask_as_a_client(proxy: Proxy, protocol: str, *options: str, text: str = "Hello") -> Finished:
    port = getattr(proxy, protocol)
    command = ["client/infer.py", "--protocol", protocol, "--url", f"https://localhost:{port}", "--timeout", "20"]
    return run(*command, "--model", "sentence_embedding", "--json", "--text", text, *options)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_the_client_speaks_tls_and_takes_its_token_from_a_file(proxy: Proxy, protocol: str) -> None:
    (proxy.folder / "token.txt").write_text(f"Authorization: Bearer {TOKEN}\n\n")
    options = ["--ca", str(proxy.folder / "certificate.pem"), "--header", f"@{proxy.folder / 'token.txt'}"]
    done = ask_as_a_client(proxy, protocol, *options)
    assert done.code == 0, done.err
    assert len(json.loads(done.out)["results"][0]["EMBEDDING"]) == 384
    # The same without https:// in the URL.
    url = ["--url", f"localhost:{getattr(proxy, protocol)}", "--tls"]
    assert ask_as_a_client(proxy, protocol, *options, *url).code == 0


@pytest.mark.parametrize("protocol", ["http", pytest.param("grpc", marks=pytest.mark.rarer)])
def test_the_client_says_in_one_sentence_why_it_is_kept_out(proxy: Proxy, protocol: str, tmp_path: Path) -> None:
    certificate = ["--ca", str(proxy.folder / "certificate.pem")]
    (tmp_path / "none.pem").write_text("no certificate")
    (tmp_path / "none.txt").write_text("secret")
    url = f"localhost:{getattr(proxy, protocol)}"
    cases = {
        f"{url} lets nobody in without leave: expected a token that it knows": certificate,
        f"{url} lets nobody in without leave: ": [*certificate, "--header", "Authorization: Bearer another"],
        f"the server at {url} is not trusted: expected a certificate of that name from an authority in the default": [],
        f"the server at 127.0.0.1:{getattr(proxy, protocol)} is not trusted: ": [
            *certificate,
            "--url",
            f"https://127.0.0.1:{getattr(proxy, protocol)}",
        ],
        f"{tmp_path}/none.pem cannot be used: expected certificates in PEM": ["--ca", str(tmp_path / "none.pem")],
        f"{tmp_path}/nowhere.pem cannot be used: ": ["--ca", str(tmp_path / "nowhere.pem")],
        f"{tmp_path}/none.txt holds no header: expected NAME: VALUE": ["--header", f"@{tmp_path / 'none.txt'}"],
        f"{tmp_path}/nowhere.txt cannot be read: ": ["--header", f"@{tmp_path / 'nowhere.txt'}"],
        "--header holds no header: expected NAME: VALUE": ["--header", "secret"],
    }
    for sentence, options in cases.items():
        done = ask_as_a_client(proxy, protocol, *options)
        assert done.code == 1, sentence
        assert done.err.startswith(f"error: {sentence}"), done.err
        assert done.err.endswith(".\n") and done.err.count("\n") == 1, done.err
        assert "secret" not in done.err and "<" not in done.err


def test_without_tls_the_proxy_says_so_and_the_client_repeats_it(proxy: Proxy) -> None:
    done = ask_as_a_client(proxy, "http", "--url", f"http://localhost:{proxy.http}")
    assert done.code == 1
    assert "The plain HTTP request was sent to HTTPS port" in done.err
    assert done.err.count("\n") == 1


def test_the_list_of_models_can_be_opened_and_nothing_else_that_the_key_opens(proxy: Proxy, tmp_path: Path) -> None:
    http, grpc = find_ports(2)
    text = (CHECKOUT / "docker" / "index" / "nginx.conf").read_text()
    (recipe,) = re.findall(r"^#     (sed .*) \.cache/control\.key$", text, re.MULTILINE)
    for old, new in (
        ("127.0.0.1:8010", f"127.0.0.1:{http}"),
        ("127.0.0.1:8011", f"127.0.0.1:{grpc}"),
        ("127.0.0.1:8000", f"127.0.0.1:{proxy.server.http}"),
        ("127.0.0.1:8001", f"127.0.0.1:{proxy.server.grpc}"),
        ("/tmp/nginx-index", str(tmp_path / "nginx")),
    ):
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "nginx.conf").write_text(text)
    key = subprocess.run([*shlex.split(recipe), proxy.key_file], capture_output=True, text=True, check=True).stdout
    (tmp_path / "key.conf").write_text(key)
    with (
        running_nginx(tmp_path, http),
        tritonclient.http.InferenceServerClient(f"127.0.0.1:{http}") as over_http,
        tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{grpc}") as over_grpc,
    ):
        assert "sentence_embedding" in {model["name"] for model in over_http.get_model_repository_index()}
        assert "sentence_embedding" in {model.name for model in over_grpc.get_model_repository_index().models}
        for client in (over_http, over_grpc):
            assert client.is_model_ready("sentence_embedding")
            with pytest.raises(InferenceServerException, match="restricted"):
                client.unload_model("sentence_embedding")
        for path in ("models/x/load/../../../index", "models/x/load%2f..%2f..%2f..%2findex", "/index"):
            connection = http_client.HTTPConnection("127.0.0.1", http, timeout=60)
            connection.request("POST", f"/v2/repository/{path}", b"{}")
            assert connection.getresponse().status == 400
            connection.close()
