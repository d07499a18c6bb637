"""`activate --wait`: what a status port tells, and what is none."""

import hashlib
import json
import re
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import Finished
from stranger import DRIPS, answering, dripping

from export.commands import waiting
from export.commands.waiting import wait_until_served
from export.errors import ServingError
from export.repository.contents import find_active_version


@pytest.mark.parametrize(
    "address", ["1", "localhost", "localhost:", ":8003", "localhost:0", "[::1", "ftp://a:1", "a b:1"]
)
def test_an_address_without_a_port_is_refused_before_anything_is_activated(
    address: str, models: Path, export_cli: Callable[..., Finished]
) -> None:
    done = export_cli("activate", "tickets", "--repository", str(models), "--wait", "localhost:19299", address)
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert "--wait cannot be used: expected HOST:PORT of a server's status port" in done.err
    assert f"got {address!r}; correct it, or write what else belongs" in done.err
    assert find_active_version(models, "tickets") == 1


def test_a_port_that_answers_in_another_protocol_is_refused_in_a_sentence(models: Path) -> None:
    with socket.create_server(("localhost", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 10)
                connection.sendall(bytes(9))

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ServingError, match="cannot be asked for it: expected the status port of a running server"):
            wait_until_served(f"localhost:{listener.getsockname()[1]}", "tickets", 1, print)
        thread.join()


def test_a_version_that_another_activation_overtakes_is_waited_for_no_longer(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "_SETTLING_S", 0)
    told = [{"active": active, "served": 1, "state": "rolling", "reason": ""} for active in (2, 1, 2, 1)]
    answers = [json.dumps({"follows": True, "models": {"tickets": each}}) for each in told]
    # For a moment it is told of as it was, and then for good.
    with answering(*answers) as address, pytest.raises(ServingError) as caught:
        wait_until_served(address, "tickets", 2, print)
    assert str(caught.value) == (
        "version 2 of tickets is not waited for any more: expected it to stay the active one, got version 1; activate "
        "it again."
    )


def test_a_server_of_another_repository_does_not_count_for_the_number_of_its_version(
    models: Path, monkeypatch: pytest.MonkeyPatch, export_cli: Callable[..., Finished]
) -> None:
    monkeypatch.setattr(waiting, "_NOTICE_S", 0.3)
    served = {"active": 2, "served": 2, "state": "served", "reason": ""}
    answers = [json.dumps({"follows": True, "models": {"tickets": served | {"golden": end * 64}}}) for end in "ab"]
    with answering(*answers) as address:
        wait_until_served(address, "tickets", 2, print, "b" * 64)
    with answering(answers[0]) as address, pytest.raises(ServingError) as caught:
        wait_until_served(address, "tickets", 2, print, "b" * 64)
    assert str(caught.value) == (
        f"version 2 of tickets is active in the repository, and the server at {address} takes no notice: expected "
        "version 2 as the active one within 0.3 s, got a version 2 with other recorded answers; pass the status port "
        "of a server of this repository."
    )
    # As its publication has it, and as a launcher of an earlier release, which does not say.
    golden = hashlib.sha256(Path(models, "tickets", "2", "golden.json").read_bytes()).hexdigest()
    for told in (served | {"golden": golden}, served):
        with answering(json.dumps({"follows": True, "models": {"tickets": told}})) as address:
            done = export_cli(
                "activate", "tickets", "2", "--repository", f"{models}/../{models.name}", "--wait", address
            )
            assert done.code == 0, done.err


WRONG_REASON = '{"models": {"tickets": {"active": 1, "served": 0, "state": "rolling", "reason": 5}}}'


@pytest.mark.parametrize(
    "answer",
    [
        *("", "{}", "[]", '{"models": {"tickets": {}}}', '{"models": {"tickets": 5}}', '{"models": {"tickets": null}}'),
        WRONG_REASON,
    ],
)
def test_a_program_that_answers_in_the_place_of_a_status_port_is_refused_in_a_sentence(
    models: Path, answer: str
) -> None:
    with answering(answer) as address, pytest.raises(ServingError, match="cannot be asked for it") as caught:
        wait_until_served(address, "tickets", 1, print)
    assert f"a running server, got {repr(answer[:100]) if answer else 'nothing'}; pass its address" in str(caught.value)


@pytest.mark.parametrize(("beginning", "drop"), DRIPS)
def test_a_program_that_drips_in_the_place_of_a_status_port_is_not_waited_for(
    beginning: bytes, drop: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "_TIMEOUT_S", 0.3)
    with dripping(beginning, drop) as address, pytest.raises(ServingError, match="cannot be asked for it") as caught:
        wait_until_served(address, "tickets", 1, print)
    assert "expected the status port of a running server, got 'timed out'; pass its address" in str(caught.value)


@pytest.mark.parametrize("length", ["", f"Content-Length: {10**15}\r\n"])
def test_a_program_that_floods_in_the_place_of_a_status_port_is_not_read_on(
    length: str,
) -> None:
    beginning = f"HTTP/1.1 200 OK\r\n{length}\r\n".encode()
    with dripping(beginning, bytes(1 << 20)) as address, pytest.raises(ServingError) as caught:
        wait_until_served(address, "tickets", 1, print)
    # The one or the other comes first, by how fast this machine is.
    assert re.search("a running server, got '(an answer of more than 268435456 bytes|timed out)'", str(caught.value))
