"""`python -m server`: what it finds, what it refuses, how it ends."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from harness import CHECKOUT, Published, run
from launcher import find_ports, install_as_in_containers, running, write_older_golden
from tritonclient.utils import InferenceServerException

from demo.serving import Addresses
from modelyard.recorded_answers import measure_answer
from server.errors import CheckError, NotFoundError
from server.following.check import check_ensembles
from server.following.models import list_models
from server.tritonserver.installation import check_libpython, find_installation
from server.tritonserver.orphans import PREFIX, own
from server.tritonserver.processes import list_children

BASE_PYTHON = Path(sys.base_prefix, "bin", f"python3.{sys.version_info[1]}")


def serve_until_exit(*arguments: str, executable: Path | str = sys.executable, **environment: str) -> tuple[int, str]:
    done = subprocess.run(
        [str(executable), "-m", "server", *arguments],
        cwd=CHECKOUT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stderr


def test_a_taken_port_is_refused_with_its_option(published: Published) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        http, metrics, status = map(str, find_ports(3))
        ports = ["--http-port", http, "--grpc-port", str(port), "--metrics-port", metrics, "--status-port", status]
        code, error = serve_until_exit("--repository", str(published.repository), *ports)
    assert code == 1
    assert error == (
        f"error: port {port} on 127.0.0.1 cannot be used: expected it to be free, got 'Address already in use'; "
        f"stop the program that listens there or pass another --grpc-port.\n"
    )


@pytest.mark.parametrize(
    ("port", "code"),
    [
        ("http", 200),
        pytest.param("http", 404, marks=pytest.mark.rarer),
        pytest.param("metrics", 200, marks=pytest.mark.rarer),
    ],
)
def test_a_port_that_is_taken_while_models_are_loaded_ends_the_start_in_a_sentence(
    published: Published, port: str, code: int
) -> None:
    class Stranger(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with running(published.repository) as server:
        while not list_children(server.process.pid):
            time.sleep(0.01)
        with ThreadingHTTPServer(("127.0.0.1", getattr(server, port)), Stranger) as stranger:
            threading.Thread(target=stranger.serve_forever, daemon=True).start()
            assert server.finish() == 1
            stranger.shutdown()
        assert server.lines[-1] == (
            f"error: tritonserver could not start: expected it to listen on http://127.0.0.1:{server.http}, got exit "
            f"code 1; see its log above."
        )
        assert not any("Traceback" in line for line in server.lines)


@pytest.mark.parametrize("command", ["serve", "check", "doctor"])
@pytest.mark.parametrize(
    ("option", "port"),
    [("--http-port", 65536), ("--grpc-port", 0), ("--metrics-port", -1), ("--status-port", 10**20)],
)
def test_what_is_no_port_is_refused_wherever_one_is_named(tmp_path: Path, command: str, option: str, port: int) -> None:
    code, error = serve_until_exit(command, "--repository", str(tmp_path), option, str(port))
    assert code == 2
    assert error == f"error: {option} is no port: expected a number from 1 to 65535, got {port}; correct it.\n"


@pytest.mark.parametrize("option", ["--grpc-port", "--metrics-port", "--status-port"])
def test_two_options_with_one_port_are_refused(published: Published, option: str) -> None:
    (port,) = map(str, find_ports(1))
    code, error = serve_until_exit("--repository", str(published.repository), "--http-port", port, option, port)
    assert code == 2
    assert error == (
        f"error: --http-port and {option} name one port: expected four different ones, got {port} for both; "
        f"pass another {option}.\n"
    )


@pytest.mark.parametrize(
    ("host", "told", "got"),
    [
        ("300.1.1.1", "300.1.1.1", "'Name or service not known'"),
        # RFC 5737 and RFC 3849: addresses of nobody.
        ("192.0.2.1", "192.0.2.1", "'Cannot assign requested address'"),
        ("2001:db8::1", "2001:db8::1", "'Cannot assign requested address'"),
        ("ü..ü", "ü..ü", "'encoding of hostname failed'"),
        ("", "an empty --host", "nothing"),
    ],
)
def test_a_host_on_which_nothing_can_listen_is_refused_as_one(
    published: Published, host: str, told: str, got: str
) -> None:
    code, error = serve_until_exit("--repository", str(published.repository), "--host", host)
    assert code == 1
    assert error.startswith(
        f"error: nothing can listen on {told}: expected an address or a name of this machine, got {got}"
    )
    assert error.endswith("; correct --host (127.0.0.1 for this machine alone, 0.0.0.0 for whoever reaches it).\n")


def test_a_missing_or_empty_repository_is_refused(tmp_path: Path) -> None:
    code, error = serve_until_exit("--repository", str(tmp_path / "none"))
    assert code == 1
    assert "there is no model repository" in error
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.pbtxt").touch()
    code, error = serve_until_exit("--repository", str(tmp_path))
    assert code == 1
    assert error.count("\n") == 1
    assert "holds nothing to serve: expected a model with config.pbtxt and a numbered version, got none" in error


def test_it_waits_for_a_first_model_where_it_is_asked_to(published: Published, tmp_path: Path) -> None:
    repository, coming = tmp_path / "models", tmp_path / "coming"
    # A fresh checkout has configurations without a version.
    shutil.copytree(CHECKOUT / "model_repository", repository, ignore=shutil.ignore_patterns("[0-9]*"))
    with running(repository, "--wait") as server:
        server.read_until(f"{repository} holds nothing to serve yet; waiting for what `python -m export run` publishes")
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(f"http://127.0.0.1:{server.status}/ready", timeout=10)
        assert server.stop(signal.SIGTERM) == 0
    with running(repository, "--wait") as server:
        server.read_until("waiting for what")
        shutil.copytree(published.repository, coming)
        # The ensemble last: before it, its steps are nothing to serve.
        for folder in sorted(coming.iterdir(), reverse=True):
            shutil.rmtree(repository / folder.name, ignore_errors=True)
            folder.rename(repository / folder.name)
        server.read_until("sentence_embedding ")
        server.read_until("serving HTTP")
        assert server.stop() == 0


def test_without_any_tritonserver_it_says_where_it_looked(published: Published) -> None:
    """The interpreter that the environment was made from has no packages of ours."""
    code, error = serve_until_exit("--repository", str(published.repository), executable=BASE_PYTHON, PATH="/nowhere")
    assert code == 1
    assert error.startswith("error: no tritonserver was found: expected one on PATH or in the wheel nvidia-pytriton")
    assert error.count("\n") == 1


def test_its_commands_are_listed_and_each_explains_itself() -> None:
    done = run("-m", "server", "--help")
    assert done.code == 0
    for command in ("serve", "check", "doctor"):
        assert f"    {command} " in done.out
        explained = run("-m", "server", command, "--help")
        assert explained.code == 0
        assert f"examples:\n  python -m server {command}\n" in explained.out
        assert "exit codes:\n  0  " in explained.out
    wrong = run("-m", "server", "start")
    assert wrong.code == 2
    assert "invalid choice: 'start'" in wrong.err


def test_options_without_a_command_are_those_of_serve(tmp_path: Path) -> None:
    outcomes = [run("-m", "server", *command, "--repository", str(tmp_path)) for command in ([], ["serve"])]
    assert outcomes[0].code == 1
    assert "holds nothing to serve" in outcomes[0].err
    assert outcomes[0] == outcomes[1]


def test_an_interpreter_without_its_shared_library_is_refused_with_the_package(tmp_path: Path) -> None:
    (tmp_path / "libpython3.11.so.1.0").touch()
    check_libpython("3.11", (tmp_path,))
    with pytest.raises(
        NotFoundError,
        match=r"expected the shared library libpython3\.99\.so\.1\.0, got none that this user may read; inst",
    ):
        check_libpython("3.99", (tmp_path,))


def test_a_folder_of_libraries_that_may_not_be_looked_into_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Root may look into every folder; of a name that is too long nobody is told either that there is none.
    closed = tmp_path / ("x" * 300)
    with pytest.raises(NotFoundError, match="got none that this user may read"):
        check_libpython("3.99", (closed,))
    monkeypatch.setattr(sysconfig, "get_config_var", {"LIBDIR": str(closed)}.get)
    # Elsewhere there may be one.
    with contextlib.suppress(NotFoundError):
        assert closed not in find_installation().libraries


def test_a_repository_that_may_not_be_looked_at_is_told_as_one() -> None:
    with pytest.raises(
        NotFoundError, match="x cannot be looked at: expected folders above it that this user may enter"
    ):
        list_models(Path("x" * 300))


def test_a_tritonserver_on_path_goes_before_the_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = find_installation()
    assert wheel.source == "from the wheel nvidia-pytriton"
    (tmp_path / "tritonserver").symlink_to(wheel.executable)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found = find_installation()
    assert found.source == "found on PATH"
    assert found.executable == wheel.executable.resolve()


def test_a_container_like_installation_is_served_with_its_own_layout(published: Published, tmp_path: Path) -> None:
    environment = install_as_in_containers(tmp_path / "opt" / "tritonserver")
    with running(published.repository, environment=environment) as server:
        server.read_until("serving HTTP")
        assert "(found on PATH)" in server.lines[0]
        assert server.stop() == 0


def test_it_works_from_a_folder_full_of_traps_and_ends_cleanly(published: Published, tmp_path: Path) -> None:
    for name in ("tokenizers", "numpy", "onnxruntime", "json", "model", "tokenization"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('the working directory was imported')")
    # The command, for `python -m` imports from the working directory; of this checkout, whichever is installed.
    modelyard = (str(Path(sys.executable).with_name("modelyard")), "serve")
    environment = {"PYTHONPATH": str(CHECKOUT)}
    with running(published.repository, program=modelyard, cwd=tmp_path, environment=environment) as server:
        server.read_until("serving HTTP")
        assert any("sentence_embedding " in line and "answers as verified" in line for line in server.lines)
        assert server.stop(signal.SIGTERM) == 0
        assert server.lines[-1] == "stopped"


def test_a_broken_model_is_named_and_its_neighbours_are_served(published: Published, tmp_path: Path) -> None:
    repository = Path(shutil.copytree(published.repository, tmp_path / "models"))
    for step in ("", "_preprocess", "_model"):
        broken = Path(shutil.copytree(repository / f"sentence_embedding{step}", repository / f"broken{step}"))
        config = broken / "config.pbtxt"
        config.write_text(
            config.read_text()
            .replace("sentence_embedding_", "broken_")
            .replace('"sentence_embedding"\n', '"broken"\n', 1)
        )
    config = repository / "broken_model" / "config.pbtxt"
    config.write_text(config.read_text().replace('name: "broken"', 'name: "sentence_embedding"'))
    model = repository / "broken_model" / "1" / "model.onnx"
    model.write_bytes(model.read_bytes()[:1000])
    (repository / "broken_preprocess" / "1" / "tokenizer.json").unlink()
    with running(repository) as server:
        server.read_until("serving HTTP")
        verdicts = {line.split()[0]: line for line in server.lines if line.startswith("  ")}
        assert "answers as verified" in verdicts["sentence_embedding"]
        assert "FAILED" in verdicts["broken_model"]
        assert "does not say what clients send: expected one of tokenizer.json, " in verdicts["broken_preprocess"]
        assert "FAILED" in verdicts["broken"]
        assert server.stop() == 0


def test_a_model_that_answers_otherwise_than_verified_is_named(published: Published, tmp_path: Path) -> None:
    repository = Path(shutil.copytree(published.repository, tmp_path / "models"))
    golden = repository / "sentence_embedding" / "1" / "golden.json"
    content = json.loads(golden.read_text())
    content["samples"][0]["outputs"][0]["data"][5] += 9.0
    golden.write_text(json.dumps(content))
    with running(repository) as server:
        # Nobody can ask it for an answer that is right, so nothing is served.
        assert server.finish() == 1
        assert any("published: expected the verified EMBEDDING within 1e-05" in line for line in server.lines)
        assert "no model of" in server.lines[-1]


def test_golden_answers_of_an_older_modelyard_are_refused_with_what_to_do(
    published: Published, server: Addresses, tmp_path: Path
) -> None:
    repository = Path(shutil.copytree(published.repository, tmp_path / "models"))
    golden = repository / "sentence_embedding" / "1" / "golden.json"
    write_older_golden(golden)
    with pytest.raises(CheckError) as refusal:
        check_ensembles(f"http://{server.http}", repository)
    sentence = f"sentence_embedding: {golden} was written by an older modelyard: expected samples of inputs and outputs"
    assert sentence in str(refusal.value)
    assert str(refusal.value).endswith("got text, expected; export the model again with `python -m export run`.")


@pytest.mark.parametrize(
    ("tolerances", "answer", "sentence"),
    [
        ({"max_abs_error": 1e-4}, {"SCORE": [0.9, float("nan")]}, "expected the verified SCORE within 0.0001, got nan"),
        ({"max_abs_error": 1e-4}, {"SCORE": [0.9, 0.2]}, "expected the verified SCORE within 0.0001, got 1.0e-01"),
        ({"max_relative_error": 1e-4}, {"SCORE": [0.9, 0.2]}, "expected the verified SCORE within 0.0001, got 1.1e-01"),
        ({"max_abs_error": 1e-4, "min_cosine": 0.99}, {"SCORE": [0.1, 0.9]}, "expected the verified SCORE within"),
        ({"max_abs_error": 1e-4}, {"SCORE": [0.9]}, r"expected SCORE of shape \[1, 2\], got \[1, 1\]"),
        ({"max_abs_error": 1e-4}, {}, r"expected SCORE of shape \[1, 2\], got none"),
    ],
)
def test_every_way_of_answering_otherwise_is_noticed(
    tolerances: dict[str, float], answer: dict[str, list[float]], sentence: str
) -> None:
    def describe(values: dict[str, list[float]]) -> list[dict[str, object]]:
        return [{"name": n, "datatype": "FP32", "shape": [1, len(v)], "data": v} for n, v in values.items()]

    recorded = describe({"SCORE": [0.9, 0.1]})
    assert measure_answer(recorded, recorded, tolerances) == 0.0
    with pytest.raises(ValueError, match=sentence):
        measure_answer(recorded, describe(answer), tolerances)


def test_labels_without_scores_are_compared_as_they_are() -> None:
    def describe(text: str) -> list[dict[str, object]]:
        return [{"name": "TRANSCRIPT", "datatype": "BYTES", "shape": [1, 1], "data": [text]}]

    assert measure_answer(describe("one"), describe("one"), {"max_abs_error": 1e-4}) == 0.0
    with pytest.raises(ValueError, match="expected the verified TRANSCRIPT, got another"):
        measure_answer(describe("one"), describe("two"), {"max_abs_error": 1e-4})


def test_nothing_that_loads_is_exit_1(published: Published, tmp_path: Path) -> None:
    repository = Path(shutil.copytree(published.repository, tmp_path / "models"))
    (repository / "sentence_embedding_model" / "1" / "model.onnx").write_bytes(b"no model")
    (repository / "sentence_embedding_preprocess" / "1" / "tokenizer.json").write_text("{}")
    with running(repository) as server:
        assert server.finish() == 1
        assert any("can be served: expected at least one of" in line for line in server.lines)


def test_requests_in_flight_are_answered_when_it_stops(published: Published) -> None:
    texts = np.array([["a sentence of some length to be embedded " * 8]] * 32, dtype=np.object_)
    outcomes: list[str] = []
    libraries = [tritonclient.http] * 3 + [tritonclient.grpc] * 3
    connected = threading.Barrier(len(libraries) + 1)

    def send(library: object, port: int) -> None:
        client = library.InferenceServerClient(f"localhost:{port}")  # type: ignore[attr-defined]
        tensor = library.InferInput("TEXT", [32, 1], "BYTES")  # type: ignore[attr-defined]
        tensor.set_data_from_numpy(texts)
        client.infer("sentence_embedding", [tensor])
        connected.wait(timeout=120)
        try:
            answer = client.infer("sentence_embedding", [tensor]).as_numpy("EMBEDDING")
            outcomes.append("answered" if answer.shape == (32, 384) else f"shape {answer.shape}")
        except (InferenceServerException, OSError) as exc:
            outcomes.append(str(exc))
        client.close()

    with running(published.repository) as server:
        server.read_until("serving HTTP")
        ports = {tritonclient.http: server.http, tritonclient.grpc: server.grpc}
        threads = [threading.Thread(target=send, args=(library, ports[library])) for library in libraries]
        for thread in threads:
            thread.start()
        connected.wait(timeout=120)
        deadline = time.monotonic() + 120
        while not outcomes:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        # One was answered, which took longer than to send: the others are on their way, and nobody sends anything new.
        assert server.stop() == 0
        for thread in threads:
            thread.join()
    assert outcomes == ["answered"] * len(libraries)


def test_tritonserver_does_not_outlive_a_killed_parent(published: Published) -> None:
    with running(published.repository) as server:
        server.read_until("serving HTTP")
        server.process.kill()
        server.process.wait()
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{server.http}/v2/health/live", timeout=1).close()
            except OSError:
                return
            time.sleep(0.2)
    raise AssertionError("tritonserver still answers")


def test_what_a_killed_launcher_left_behind_is_removed_and_nothing_else(published: Published, tmp_path: Path) -> None:
    environment = {"TMPDIR": str(tmp_path)}
    with running(published.repository, environment=environment) as server:
        server.read_until("serving HTTP")
        (left,) = tmp_path.glob(f"{PREFIX}*")
        tritonserver, stubs = server.tritonserver, server.find_stubs("sentence_embedding_model")
        # Stopped like this, they would stay for ever and hold the ports.
        for pid in (tritonserver, *(stub.pid for stub in stubs)):
            os.kill(pid, signal.SIGSTOP)
        server.process.kill()
        server.process.wait()
        strange = tmp_path / f"{PREFIX}strange"
        strange.mkdir()
        held = tmp_path / f"{PREFIX}held"
        held.mkdir()
        with own(held), running(published.repository, *server.options, environment=environment) as second:
            second.read_until(f"removed {left}, left behind by a launcher that was killed, and ended the")
            second.read_until("serving HTTP")
            assert not left.exists()
            assert not any(Path(f"/proc/{pid}/exe").exists() for pid in (tritonserver, *(stub.pid for stub in stubs)))
            # One without a lock may be of another program, and the lock of the other one is held.
            assert strange.is_dir() and held.is_dir()
            assert second.stop() == 0


def test_it_listens_on_this_machine_alone_unless_told_otherwise(published: Published) -> None:
    with running(published.repository) as server:
        server.read_until("serving HTTP")
        table = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
        # Local address and port, remote ones, and the state; 0A is LISTEN (proc(5)).
        listening = {line.split()[1] for line in table.splitlines() if line.split()[3] == "0A"}
        loopback = ("0100007F", "0000000000000000FFFF00000100007F")
        for port in (server.http, server.grpc, server.metrics, server.status):
            addresses = {entry.split(":")[0] for entry in listening if entry.endswith(f":{port:04X}")}
            assert addresses and addresses <= set(loopback)
        assert server.stop() == 0


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="needs a kernel with IPv6")
def test_it_listens_on_an_address_of_ipv6(published: Published) -> None:
    with running(published.repository, "--host", "::1") as server:
        server.read_until("Next: ")
        *_, where, following = server.lines
        assert where.startswith(f"serving HTTP on [::1]:{server.http}, gRPC on [::1]:{server.grpc}, ")
        assert f"infer.py --url '[::1]:{server.http}' --text" in following
        server.follow()
        for port, protocol in ((server.http, "http"), (server.grpc, "grpc")):
            done = run(
                "-m",
                "client.infer",
                "--url",
                f"[::1]:{port}",
                "--protocol",
                protocol,
                "--text",
                "A cat sleeps.",
                "--json",
            )
            assert done.code == 0, done.err
        for port, path in ((server.metrics, "metrics"), (server.status, "ready")):
            with urllib.request.urlopen(f"http://[::1]:{port}/{path}") as answer:
                assert answer.status == 200
        assert server.stop() == 0
