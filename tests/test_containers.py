"""The image and compose.yaml, built and run by podman: `make test-containers`.

Not in the default suite: it installs podman and makes a base image of Debian's packages (`docker/podman/prepare.sh`).
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import CHECKOUT, Published, run
from load import Load

from server.process import EXIT_TIMEOUT_S
from server.stubs import StubTable, list_children

pytestmark = pytest.mark.containers

CONTAINER = "modelyard_server_1"
IMAGE = "modelyard-server:0.1.0"
IMAGE_LIMIT_BYTES = 1_000_000_000
BACK_WITHIN_S = 5.0

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


@pytest.fixture(scope="module")
def built() -> None:
    """Build the image as `docker compose build` does; what pip needs to reach its index here is lent to it."""
    with tempfile.TemporaryDirectory() as folder:
        certificates = Path("/etc/ssl/certs")
        config = Path(folder, "pip.conf")
        config.write_text(f"[global]\ncert = {certificates}/ca-certificates.crt\n")
        lent = ["-v", f"{certificates}:{certificates}:ro", "-v", f"{config}:/etc/pip.conf:ro"]
        podman("build", "--pull=never", *lent, "-f", "docker/Dockerfile", "-t", IMAGE, ".")


@pytest.fixture(scope="module")
def container(built: None, published: Published) -> Iterator[Container]:
    # The container's user is nobody here.
    for path in [published.repository, *published.repository.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    repository = {"MODELYARD_REPOSITORY": str(published.repository)}
    podman("up", "--detach", "--no-build", program="podman-compose", **repository)
    try:
        server = Container()
        server.wait_until_healthy(60)
        yield server
    finally:
        podman("down", program="podman-compose", **repository)


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
