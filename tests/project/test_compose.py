"""What can be checked of images, compose.yaml and monitoring without running them."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from harness import CHECKOUT

from server.process import EXIT_TIMEOUT_S
from server.status import Status

DOCKER = CHECKOUT / "docker"
PIN = re.compile(r"^([A-Za-z0-9-]+)==([0-9.]+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def compose() -> dict:
    return yaml.safe_load((CHECKOUT / "compose.yaml").read_text())


def test_the_images_packages_are_those_of_the_project() -> None:
    project = dict(re.findall(r'"([A-Za-z0-9-]+)==([0-9.]+)"', (CHECKOUT / "pyproject.toml").read_text()))
    for name in ("requirements.txt", "Dockerfile.gpu"):
        pins = dict(re.findall(r"([A-Za-z0-9-]+)==([0-9.]+)", (DOCKER / name).read_text()))
        assert pins
        assert pins == {package: project[package] for package in pins}
    assert dict(PIN.findall((DOCKER / "requirements.txt").read_text())).keys() >= {"numpy", "nvidia-pytriton"}


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
    assert service["healthcheck"]["test"][-1] == "check"
    assert {"shm_size", "mem_limit", "pids_limit", "restart"} <= service.keys()


def test_only_the_cpu_server_starts_by_default(compose: dict) -> None:
    assert [name for name, service in compose["services"].items() if "profiles" not in service] == ["server"]


def find_own_metrics(text: str) -> set[str]:
    return set(re.findall(r"modelyard_[a-z_]+", text)) - {"modelyard_server"}


def test_dashboard_and_alerts_speak_of_metrics_that_exist() -> None:
    known = find_own_metrics(Status(["m"]).render())
    dashboard = (DOCKER / "monitoring" / "dashboards" / "modelyard.json").read_text()
    alerts = (DOCKER / "monitoring" / "alerts.yml").read_text()
    assert find_own_metrics(dashboard) and find_own_metrics(dashboard) <= known
    assert find_own_metrics(alerts) and find_own_metrics(alerts) <= known
    panels = json.loads(dashboard)["panels"]
    assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}) == len(panels)


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed; make test-containers installs it")
def test_promtool_accepts_the_rules_and_the_configuration(tmp_path: Path) -> None:
    for name, what in (("prometheus.yml", "config"), ("alerts.yml", "rules")):
        command = ["promtool", "check", what, str(DOCKER / "monitoring" / name)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "SUCCESS" in done.stdout
