"""What can be checked of images, compose.yaml and monitoring without running them."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from harness import CHECKOUT

from server.status import Status
from server.tritonserver.process import EXIT_TIMEOUT_S

DOCKER = CHECKOUT / "docker"


@pytest.fixture(scope="module")
def compose() -> dict:
    return yaml.safe_load((CHECKOUT / "compose.yaml").read_text())


def read_lock(name: str) -> dict[str, str]:
    """Return what a lock has for each package and Python: `name ; marker` → version and hashes."""
    entries = re.split(r"\n(?=[a-z0-9])", (CHECKOUT / "requirements" / f"{name}.txt").read_text())
    found = [re.fullmatch(r"([a-z0-9-]+)==(\S+) (; .+?) \\\n(.+)", entry.strip(), re.DOTALL) for entry in entries]
    return {f"{match[1]} {match[3]}": f"{match[2]} {match[4]}" for match in found if match}


@pytest.mark.parametrize("name", ["server", "export", "gateway", "gpu", "trainers", "containers", "build"])
def test_every_lock_holds_hashes_and_the_versions_that_are_tested_here(name: str) -> None:
    lock, tested = read_lock(name), read_lock("dev")
    assert lock
    assert all("--hash=sha256:" in entry for entry in lock.values())
    # Podman's and the trainers' own are in no other lock.
    foreign = {key.split()[0] for key in lock if lock[key] != tested.get(key)}
    assert foreign <= {
        "deepspeed",
        "einops",
        "hjson",
        "msgpack",
        "ninja",
        "podman-compose",
        "py-cpuinfo",
        "python-dotenv",
    }


def test_every_lock_is_that_of_its_list_and_names_no_index() -> None:
    for path in (CHECKOUT / "requirements").glob("*.txt"):
        text = path.read_text()
        assert "//" not in text and "--index" not in text, path.name
    for path in (CHECKOUT / "requirements").glob("*.in"):
        wanted = re.findall(r"^([a-z0-9-]+)(==[0-9.]+)?", path.read_text(), re.MULTILINE)
        locked = {key.split()[0]: entry.split()[0] for key, entry in read_lock(path.stem).items()}
        for package, version in wanted:
            assert package in locked
            assert not version or version == f"=={locked[package]}"


def test_the_images_install_nothing_without_its_hash_but_torch_and_the_wheel() -> None:
    for path in DOCKER.rglob("Dockerfile*"):
        # One command may stand on several lines, and several on one.
        commands = re.split(r"&&|\n", path.read_text().replace("\\\n", " "))
        for line in (command for command in commands if "pip install" in command):
            accepted = ("--require-hashes", "/tmp/torch.txt", "--no-index", "tensorrt-cu")
            assert any(word in line for word in accepted), f"{path.name}: {line}"


def test_every_image_is_pinned_and_every_build_is_there(compose: dict) -> None:
    for name, service in compose["services"].items():
        assert re.search(r":v?\d+\.\d+", service["image"]), name
        if build := service.get("build"):
            text = (CHECKOUT / build["dockerfile"]).read_text()
            assert re.search(r"^FROM \S+:\S*\d", text, re.MULTILINE)
            for source in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
                assert all((CHECKOUT / path).exists() for path in source.split()), source


@pytest.mark.parametrize("name", ["server", "server-gpu"])
def test_what_serves_has_few_rights_and_enough_time_to_stop(compose: dict, name: str) -> None:
    service = compose["services"][name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["stop_grace_period"].endswith("s")
    assert int(service["stop_grace_period"][:-1]) > EXIT_TIMEOUT_S
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert service["healthcheck"]["test"] == ["CMD", "modelyard", "check", "--any-version"]
    assert {"shm_size", "mem_limit", "pids_limit", "restart"} <= service.keys()


def test_only_the_cpu_server_starts_by_default(compose: dict) -> None:
    assert [name for name, service in compose["services"].items() if "profiles" not in service] == ["server"]


def test_what_starts_on_a_fresh_clone_waits_for_a_model_instead_of_ending_again_and_again(compose: dict) -> None:
    for name in ("server", "server-gpu"):
        assert "--wait" in compose["services"][name]["command"]
        dockerfile = CHECKOUT / compose["services"][name]["build"]["dockerfile"]
        assert 'CMD ["--wait", ' in dockerfile.read_text()


def test_every_service_gives_up_its_rights_and_has_a_limit_on_processes(compose: dict) -> None:
    for name, service in compose["services"].items():
        if name != "bench":
            assert service["cap_drop"] == ["ALL"], name
            assert service["security_opt"] == ["no-new-privileges:true"], name
            assert service["pids_limit"] > 0, name


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user; run the tests as root")
def test_the_exporter_becomes_the_owner_of_the_repository(compose: dict, tmp_path: Path) -> None:
    os.chown(tmp_path, 12345, 54321)
    words = [
        word.replace("$$", "$").replace("/models", str(tmp_path))
        for word in compose["services"]["export"]["entrypoint"]
    ]
    words[2] = words[2].replace(" modelyard ", " id ")
    for option, wanted in (("-u", "12345"), ("-g", "54321")):
        assert subprocess.run([*words, option], capture_output=True, text=True, check=True).stdout.strip() == wanted


def find_own_metrics(text: str) -> set[str]:
    return set(re.findall(r"modelyard_[a-z_]+", text)) - {"modelyard_server"}


def test_dashboard_and_alerts_speak_of_metrics_that_exist() -> None:
    status = Status()
    status.expect(["m"])
    known = find_own_metrics(status.render())
    dashboard = (DOCKER / "monitoring" / "dashboards" / "modelyard.json").read_text()
    alerts = (DOCKER / "monitoring" / "alerts.yml").read_text()
    assert find_own_metrics(dashboard) and find_own_metrics(dashboard) <= known
    assert find_own_metrics(alerts) and find_own_metrics(alerts) <= known
    panels = json.loads(dashboard)["panels"]
    assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}) == len(panels)


@pytest.mark.skipif(not shutil.which("promtool"), reason="Prometheus is not installed; `apt-get install prometheus`")
def test_promtool_accepts_the_rules_and_the_configuration(tmp_path: Path) -> None:
    for name, what in (("prometheus.yml", "config"), ("alerts.yml", "rules")):
        command = ["promtool", "check", what, str(DOCKER / "monitoring" / name)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "SUCCESS" in done.stdout
