"""`make soak-cluster` in small: three servers behind HAProxy, of which some die, drain and roll; and its simulation."""

import contextlib
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest
from benches.simulate_scale import QUEUE, Fleet, Simulation, plan
from benches.soak_cluster import HAPROXY, Callers, lose_two, stand
from harness import CHECKOUT

from export.repository.activation import activate
from export.repository.model_config import MAX_QUEUE_SIZE

CONFIG = CHECKOUT / "docker" / "haproxy" / "haproxy.cfg"

needs_haproxy = pytest.mark.skipif(HAPROXY is None, reason="HAProxy is not installed; `apt-get install haproxy`")


@needs_haproxy
def test_haproxy_accepts_the_configuration(tmp_path: Path) -> None:
    # The names of servers are those of nobody here.
    (tmp_path / "haproxy.cfg").write_text(CONFIG.read_text().replace(" server-", " 127.0.0."))
    done = subprocess.run([str(HAPROXY), "-c", "-f", "haproxy.cfg"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr


@needs_haproxy
def test_no_request_fails_while_one_dies_one_drains_and_one_rolls(two_versions: Path, tmp_path: Path) -> None:
    repository = Path(shutil.copytree(two_versions, tmp_path / "models"))
    activate(repository, "tickets", 1)
    with stand(repository, "tickets") as cluster:
        cluster.start(0, 1, 2)
        with Callers(cluster.http, cluster.grpc, repository, "tickets", clients=8) as callers:
            phases = [
                callers.during("at first", lambda: time.sleep(0.5)),
                callers.during("two are lost, and the third rolls", lambda: lose_two(cluster, 2)),
                callers.during("at last", lambda: time.sleep(0.5)),
            ]
    for phase in phases:
        assert phase.is_sound, phase.describe()
    assert {*phases[0].versions} == {1}
    assert {*phases[1].versions} <= {1, 2}
    assert {*phases[2].versions} == {2}


@needs_haproxy
def test_a_body_in_chunks_reaches_no_server(tmp_path: Path) -> None:
    chunks = b"POST /v2/models/a/infer HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nHost: b\r\n\r\n"
    with stand(tmp_path, "a") as cluster:
        deadline = time.monotonic() + 30
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                with socket.create_connection(("127.0.0.1", int(cluster.http)), timeout=30) as connection:
                    connection.sendall(chunks)
                    assert connection.recv(100).startswith(b"HTTP/1.1 411 ")
                break
            assert time.monotonic() < deadline
            time.sleep(0.1)


@pytest.mark.parametrize("use", [0.3, 0.5, 0.8])
def test_the_simulated_wait_is_that_of_queueing_theory(use: float) -> None:
    # M/M/2: the mean time is that of the computation by 1 - use².
    fleet = Fleet(servers=1, slots=2)
    item = Simulation(fleet, 50_000, rate=use * fleet.capacity).run()
    assert sum(item.latencies) / len(item.latencies) == pytest.approx(1 / (1 - use**2), rel=0.06)
    assert not item.failed and not item.repeated


def test_clients_that_wait_get_all_that_the_fleet_can_answer() -> None:
    fleet = Fleet(servers=3, slots=1)
    item = Simulation(fleet, 20_000, clients=30).run()
    assert item.rate == pytest.approx(fleet.capacity, rel=0.03)
    # Little: those in the house are the rate times what each takes.
    assert sum(item.latencies) / len(item.latencies) * item.rate == pytest.approx(30, rel=0.03)


def test_what_a_lost_server_held_is_sent_again_and_a_drained_one_loses_nothing() -> None:
    fleet = Fleet(servers=10, service_s=0.01)
    lost = Simulation(
        fleet, 5000, rate=0.7 * fleet.capacity, happenings=[(1.0, lambda fleet: fleet.lose(0, 2.0))]
    ).run()
    assert lost.repeated and not lost.failed
    drained = Simulation(
        fleet, 5000, rate=0.7 * fleet.capacity, happenings=[(1.0, lambda fleet: fleet.drain(0, 2.0))]
    ).run()
    assert not drained.repeated and not drained.failed


def test_more_than_the_fleet_can_answer_fails_once_the_queues_are_full() -> None:
    assert QUEUE == MAX_QUEUE_SIZE
    fleet = Fleet(servers=2, queue=10)
    item = Simulation(fleet, 5000, rate=2 * fleet.capacity).run()
    assert item.failed == pytest.approx(2500, rel=0.1)


def test_a_plan_leaves_room_and_spares() -> None:
    assert plan(1000, per_server=100, use=0.5, spare=2) == 22
