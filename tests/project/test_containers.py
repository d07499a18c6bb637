"""The image and compose.yaml, built and run by podman: `make test-containers`.

Not in the default suite: it installs podman and makes a base image of Debian's packages (`docker/podman/prepare.sh`).
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from benches.load import Load
from harness import CHECKOUT, Published, run

from server.healing.stubs import StubTable
from server.tritonserver.process import EXIT_TIMEOUT_S
from server.tritonserver.processes import list_children

pytestmark = pytest.mark.containers

CONTAINER = "modelyard_server_1"
IMAGE = "modelyard-server:0.1.0"
EXPORT_IMAGE = "modelyard-export:0.1.0"
TOKEN = "4f1c" * 16
PROFILES = ["--profile", "tls", "--profile", "monitoring"]
IMAGE_LIMIT_BYTES = 1_000_000_000
BACK_WITHIN_S = 60.0

# Besides podman's own programs, compose calls it by name.
ENVIRONMENT = os.environ | {
    "CONTAINERS_CONF": str(CHECKOUT / "docker" / "podman" / "containers.conf"),
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
}


def podman(*arguments: str, program: str = "podman", **environment: str) -> str:
    done = subprocess.run(
        [program, *arguments], cwd=CHECKOUT, env=ENVIRONMENT | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Container:
    """The server of compose.yaml, on its own ports; has what `Load` asks of a server."""

    http, grpc, metrics, status = 8000, 8001, 8002, 8003

    @property
    def tritonserver(self) -> int:
        """The id of the process, as this machine sees it."""
        pids = [int(podman("inspect", CONTAINER, "--format", "{{.State.Pid}}"))]
        while pids:
            pid = pids.pop()
            if Path(f"/proc/{pid}/comm").read_text().strip() == "tritonserver":
                return pid
            pids += list_children(pid)
        raise AssertionError("there is no tritonserver in the container")

    def is_healthy(self) -> bool:
        """Run the health check that Docker would run every ten seconds; here there is no systemd to do it."""
        command = ["podman", "healthcheck", "run", CONTAINER]
        return subprocess.run(command, env=ENVIRONMENT, capture_output=True, check=False).returncode == 0

    def wait_until_healthy(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while not self.is_healthy():
            assert time.monotonic() < deadline, podman("logs", CONTAINER)
            time.sleep(0.2)


def build(dockerfile: str, image: str) -> None:
    """Build an image as `docker compose build` does; what pip needs to reach its packages here is lent to it."""
    with tempfile.TemporaryDirectory() as folder:
        certificates = Path("/etc/ssl/certs")
        config = Path(folder, "pip.conf")
        lines = ["[global]", f"cert = {certificates}/ca-certificates.crt"]
        lent = ["-v", f"{certificates}:{certificates}:ro", "-v", f"{config}:/etc/pip.conf:ro"]
        # Packages that this machine keeps, such as a torch without CUDA's libraries.
        for kept in filter(os.path.isdir, os.environ.get("PIP_FIND_LINKS", "").split()):
            lines.append(f"find-links = {kept}")
            lent += ["-v", f"{kept}:{kept}:ro"]
        config.write_text("\n".join(lines))
        podman("build", "--pull=never", *lent, "-f", dockerfile, "-t", image, ".")


@pytest.fixture(scope="module")
def built() -> None:
    build("docker/Dockerfile", IMAGE)


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return what an operator puts beside nginx.conf: a certificate, its key, tokens; and the client's header."""
    folder = tmp_path_factory.mktemp("tls")
    shutil.copy(CHECKOUT / "docker" / "tls" / "nginx.conf", folder)
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    make += ["-addext", "subjectAltName=DNS:localhost", "-keyout", "key.pem", "-out", "certificate.pem"]
    subprocess.run(make, cwd=folder, check=True, capture_output=True)
    (folder / "tokens.conf").write_text(f'"~^Bearer {TOKEN}$" tester;\n')
    (folder / "token.txt").write_text(f"Authorization: Bearer {TOKEN}\n")
    for path in (folder, *folder.iterdir()):
        os.chown(path, 10001, 10001)
    return folder


@pytest.fixture(scope="module")
def container(built: None, published: Published, tls: Path) -> Iterator[Container]:
    # The container's user is nobody here.
    for path in [published.repository, *published.repository.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    environment = {"MODELYARD_REPOSITORY": str(published.repository), "MODELYARD_TLS": str(tls)}
    # Of the monitoring profile all but Grafana, for which there is no image here.
    services = ["server", "tls", "prometheus"]
    podman(*PROFILES, "up", "--detach", "--no-build", *services, program="podman-compose", **environment)
    try:
        server = Container()
        server.wait_until_healthy(60)
        yield server
    finally:
        podman(*PROFILES, "down", "--volumes", program="podman-compose", **environment)


def test_the_image_is_small_and_holds_no_torch(built: None) -> None:
    (image,) = json.loads(podman("image", "inspect", IMAGE))
    assert image["Size"] < IMAGE_LIMIT_BYTES
    assert image["Config"]["User"] == "10001:10001"
    listing = podman("run", "--rm", "--entrypoint", "ls", IMAGE, "/opt/venv/lib/python3.11/site-packages")
    assert "onnxruntime" in listing
    assert not {"torch", "transformers", "onnx", "pip"} & set(listing.split())


def test_clients_curl_and_perf_analyzer_are_answered(container: Container) -> None:
    for options in (["--url", "localhost:8000"], ["--url", "localhost:8001", "--protocol", "grpc"]):
        done = run("client/infer.py", *options, "--text", "Hello", "--json")
        assert done.code == 0, done.err
        assert len(json.loads(done.out)["results"][0]["EMBEDDING"]) == 384
    body = '{"inputs":[{"name":"TEXT","datatype":"BYTES","shape":[1,1],"data":["Hello"]}]}'
    url = "localhost:8000/v2/models/sentence_embedding/infer"
    assert '"shape":[1,384]' in subprocess.run(["curl", "-s", url, "-d", body], capture_output=True, text=True).stdout
    done = run("-m", "client.bench", "--concurrency", "4", "--requests", "50", "--json")
    assert done.code == 0, done.err
    assert all(entry["inferences_per_s"] > 0 for entry in json.loads(done.out))


def test_it_runs_without_rights_on_a_root_it_cannot_write(container: Container) -> None:
    status = Path(f"/proc/{container.tritonserver}/status").read_text()
    assert "\nUid:\t10001\t10001" in status
    assert "\nCapEff:\t0000000000000000" in status
    assert "\nNoNewPrivs:\t1" in status
    write = ["podman", "exec", CONTAINER, "python", "-c", "open('/opt/modelyard/x', 'w')"]
    assert "Read-only file system" in subprocess.run(write, env=ENVIRONMENT, capture_output=True, text=True).stderr
    # The key stands in no command line in here either.
    assert b"modelyard-key=xxxx" in Path(f"/proc/{container.tritonserver}/cmdline").read_bytes()


@pytest.mark.parametrize(("protocol", "port"), [("http", 8443), ("grpc", 8444)])
def test_tls_and_tokens_stand_in_front_of_it(container: Container, tls: Path, protocol: str, port: int) -> None:
    ask = ["client/infer.py", "--url", f"https://localhost:{port}", "--protocol", protocol, "--text", "Hello", "--json"]
    ask += ["--ca", str(tls / "certificate.pem")]
    done = run(*ask, "--header", f"@{tls / 'token.txt'}")
    assert done.code == 0, done.err
    assert len(json.loads(done.out)["results"][0]["EMBEDDING"]) == 384
    done = run(*ask)
    assert done.code == 1
    assert "lets nobody in without leave" in done.err


def test_prometheus_scrapes_it_by_name_and_evaluates_its_rules(container: Container) -> None:
    def get(path: str) -> dict:
        with urllib.request.urlopen(f"http://127.0.0.1:9090/api/v1/{path}", timeout=5) as response:
            return json.load(response)["data"]

    deadline = time.monotonic() + 60
    while {(target["scrapeUrl"], target["health"]) for target in get("targets")["activeTargets"]} != {
        ("http://server:8002/metrics", "up"),
        ("http://server:8003/metrics", "up"),
    }:
        assert time.monotonic() < deadline, get("targets")
        time.sleep(0.5)
    (found,) = get("query?query=modelyard_ready")["result"]
    assert found["value"][1] == "1"
    rules = [rule for group in get("rules")["groups"] for rule in group["rules"]]
    assert len(rules) == (CHECKOUT / "docker" / "monitoring" / "alerts.yml").read_text().count("- alert:")
    assert {rule["lastError"] for rule in rules if "lastError" in rule} <= {""}


def test_a_process_that_loops_or_blocks_can_be_seen_inside(container: Container) -> None:
    """The container's user has no rights, and needs none to look into what it started."""
    look = (
        "from modelyard.server.healing.stubs import StubTable\n"
        "from pathlib import Path\n"
        "(pid,) = [int(p.parent.name) for p in Path('/proc').glob('[0-9]*/comm') if 'tritonserver' in p.read_text()]\n"
        "print({stub.is_idle for stub in StubTable(pid).refresh()})"
    )
    assert podman("exec", CONTAINER, "python", "-c", look).strip() == "{True}"


def test_killed_processes_come_back_inside(container: Container, published: Published) -> None:
    with Load(container, published.repository) as load:  # type: ignore[arg-type]
        for model in ("sentence_embedding_preprocess", "sentence_embedding_model", None):
            load.wait_for_answer(time.monotonic(), 20)
            tritonserver = container.tritonserver
            stubs = [stub for stub in StubTable(tritonserver).refresh() if stub.model == model and not stub.is_dead]
            moment = time.monotonic()
            os.kill(stubs[-1].pid if stubs else tritonserver, 9)
            # One instance of two may answer on while the other is dead: what counts is that errors end.
            time.sleep(1.0)
            load.wait_for_answer(moment, BACK_WITHIN_S)
    load.assert_sound()
    container.wait_until_healthy(BACK_WITHIN_S)
    with urllib.request.urlopen("http://127.0.0.1:8003/metrics", timeout=5) as response:
        assert "modelyard_tritonserver_restarts_total 1" in response.read().decode()


def test_it_stops_with_requests_in_flight_and_loses_none(container: Container) -> None:
    texts = [f"sentence {number} of some length to be embedded " * 8 for number in range(32)]
    outcomes: list[int] = []

    def ask(protocol: str, port: int) -> None:
        done = run("client/infer.py", "--url", f"localhost:{port}", "--protocol", protocol, "--json", "--text", *texts)
        outcomes.append(len(json.loads(done.out)["results"]) if done.code == 0 else -1)

    ports = [("http", 8000), ("grpc", 8001)] * 3
    threads = [threading.Thread(target=ask, args=port) for port in ports]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 30
    while count_requests("sentence_embedding_preprocess") < count_requests("sentence_embedding") + 4:
        assert time.monotonic() < deadline, "the requests were never in flight together"
        time.sleep(0.005)
    start = time.monotonic()
    podman("stop", "--time", "15", CONTAINER)
    assert time.monotonic() - start < EXIT_TIMEOUT_S + 2
    for thread in threads:
        thread.join()
    assert podman("inspect", CONTAINER, "--format", "{{.State.ExitCode}}").strip() == "0"
    # Those that had not connected yet were refused; those that had were answered in full.
    assert outcomes.count(32) >= 4


def count_requests(model: str) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:8000/v2/models/{model}/stats", timeout=5) as response:
        (statistics,) = json.load(response)["model_stats"]
    return int(statistics["inference_stats"]["success"]["count"])


def test_the_exporter_publishes_from_a_container(checkpoint: Path, tmp_path: Path) -> None:
    build("docker/Dockerfile.export", EXPORT_IMAGE)
    repository = tmp_path / "models"
    repository.mkdir()
    os.chown(repository, 12345, 54321)
    environment = {"MODELYARD_CHECKPOINTS": str(checkpoint.parent), "MODELYARD_REPOSITORY": str(repository)}
    command = ["run", f"/checkpoints/{checkpoint.name}", "--name", "boxed", "--repository", "/models"]
    podman(
        "--profile", "export", "run", "--rm", "--no-deps", "export", *command, program="podman-compose", **environment
    )
    published = (repository / "boxed" / "1" / "verification.json").stat()
    assert (published.st_uid, published.st_gid) == (12345, 54321)
    assert {path.name for path in repository.iterdir()} >= {"boxed", "boxed_model", "boxed_preprocess"}
