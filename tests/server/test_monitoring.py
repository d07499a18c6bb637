"""Prometheus as `compose.yaml --profile monitoring` configures it, scraping a real server: rules, alerts, dashboard."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from benches.load import Load
from harness import CHECKOUT, Published
from launcher import find_ports, running

from server.tritonserver.installation import find_installation

MONITORING = CHECKOUT / "docker" / "monitoring"

pytestmark = pytest.mark.skipif(
    not shutil.which("prometheus") or not shutil.which("promtool"),
    reason="Prometheus is not installed; `apt-get install prometheus`",
)


def promtool(*arguments: str, cwd: Path = MONITORING) -> str:
    done = subprocess.run(["promtool", *arguments], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_alert_fires_when_it_should_and_is_silent_else(tmp_path: Path) -> None:
    text = (CHECKOUT / "tests" / "alerts_test.yml").read_text()
    (tmp_path / "alerts_test.yml").write_text(text.replace("[ALERTS]", f"[{MONITORING / 'alerts.yml'}]"))
    assert "SUCCESS" in promtool("test", "rules", "alerts_test.yml", cwd=tmp_path)
    names = [line.split()[-1] for line in (MONITORING / "alerts.yml").read_text().splitlines() if "- alert:" in line]
    assert names and all(f"alertname: {name}\n" in text for name in names)


@pytest.fixture(scope="module")
def ask(published: Published, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Return a function that asks Prometheus, which watches a server that answers, loses a process and heals."""
    folder = tmp_path_factory.mktemp("prometheus")
    (port,) = find_ports(1)
    with running(published.repository) as server:
        server.read_until("serving HTTP")
        server.follow()
        config = (MONITORING / "prometheus.yml").read_text()
        for old, new in (
            ("server:8002", f"127.0.0.1:{server.metrics}"),
            ("server:8003", f"127.0.0.1:{server.status}"),
            ("_interval: 5s", "_interval: 1s"),
        ):
            assert old in config
            config = config.replace(old, new)
        (folder / "prometheus.yml").write_text(config)
        shutil.copy(MONITORING / "alerts.yml", folder)
        options = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
        options += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
        prometheus = subprocess.Popen(["prometheus", *options], cwd=folder)
        try:
            with Load(server, published.repository, clients=2):
                time.sleep(4)
                os.kill(server.find_stubs("sentence_embedding_preprocess")[0].pid, signal.SIGKILL)
                server.wait_for_line("answers again", 60)
                time.sleep(4)

            def get(path: str, **parameters: str) -> Any:
                url = f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
                with urllib.request.urlopen(url, timeout=10) as response:
                    return json.load(response)["data"]

            yield get
        finally:
            prometheus.terminate()
            prometheus.wait(timeout=30)


def test_both_of_the_servers_ports_are_scraped(ask: Callable[..., Any]) -> None:
    targets = ask("targets")["activeTargets"]
    assert len(targets) == 2
    assert {(target["health"], target["lastError"]) for target in targets} == {("up", "")}


def test_every_rule_is_evaluated_and_none_fires_for_nothing(ask: Callable[..., Any]) -> None:
    rules = [rule for group in ask("rules")["groups"] for rule in group["rules"]]
    assert len(rules) == (MONITORING / "alerts.yml").read_text().count("- alert:")
    assert {rule["health"] for rule in rules} == {"ok"}
    assert not [rule["name"] for rule in rules if rule["state"] == "firing"]


def test_every_panel_of_the_dashboard_shows_something(ask: Callable[..., Any]) -> None:
    dashboard = json.loads((MONITORING / "dashboards" / "modelyard.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            assert ask("query", query=target["expr"])["result"], f"{panel['title']}: {target['expr']}"


def test_the_death_and_the_return_of_a_process_are_counted(ask: Callable[..., Any]) -> None:
    labels = '{model="sentence_embedding_preprocess",reason="died"}'
    (found,) = ask("query", query=f"modelyard_backend_deaths_total{labels}")["result"]
    assert float(found["value"][1]) == 1


def test_what_the_autoscalers_ask_for_is_made_of_series_that_are_there(ask: Callable[..., Any]) -> None:
    text = (CHECKOUT / "docker" / "kubernetes" / "monitoring" / "adapter.yaml").read_text()
    series = set(re.findall(r"\bnv_[a-z_]+", text))
    known = set(ask("label/__name__/values"))
    of_gpus = {name for name in series if name.startswith("nv_gpu_")}
    assert series - of_gpus and series - of_gpus <= known
    # What no GPU is here for, the program must at least have a name for.
    program = next(path for folder in find_installation().libraries for path in folder.glob("libtritonserver*.so"))
    assert all(name.encode() in program.read_bytes() for name in of_gpus)
    (rule, *_) = yaml.safe_load(text)["rules"]["custom"]
    query = rule["metricsQuery"].replace("<<.GroupBy>>", "job").replace("<<.LabelMatchers>>", 'job="modelyard"')
    (found,) = ask("query", query=query)["result"]
    assert float(found["value"][1]) >= 0
