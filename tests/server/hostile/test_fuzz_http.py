"""The v2 HTTP API, fuzzed by schemathesis from its description: every request is answered, and nothing dies of one.

`make fuzz` sends many more.
"""

import json
import math
import os
from collections.abc import Iterator

import pytest
import requests
import schemathesis
from harness import CHECKOUT, Published
from hypothesis import HealthCheck, Phase, assume, settings
from launcher import Running, running

EXAMPLES = int(os.environ.get("MODELYARD_FUZZ", "25"))
TIMEOUT_S = 20.0

# What tritonserver 2.51 answers to a request that it cannot use: refused, not there, closed, not of this method, not
# understood (500 is its word for JSON of the wrong type as well), too busy.
REFUSALS = {400, 403, 404, 405, 500, 501, 503}

BYTES_OF = {"BOOL": 1, "UINT8": 1, "FP32": 4, "INT64": 8}

schema = schemathesis.openapi.from_path(CHECKOUT / "tests" / "kserve_v2.yaml")

TEXT = {"name": "TEXT", "datatype": "BYTES", "shape": [1, 1], "data": ["Hello"]}
GOOD = {"inputs": [TEXT]}


@pytest.fixture(scope="module")
def server(published: Published) -> Iterator[Running]:
    with running(published.repository) as server:
        server.read_until("serving HTTP")
        server.follow()
        yield server


def read_ends(server: Running) -> dict[str, float]:
    """Return how often anything has ended."""
    return {name: value for name, value in server.read_metrics().items() if "deaths" in name or "restarts" in name}


@pytest.fixture(scope="module", autouse=True)
def at_first(server: Running) -> dict[str, float]:
    """Return the same before the first request: now and then tritonserver 2.51 dies of its own start."""
    return read_ends(server)


def declares_more_than_memory(body: object) -> bool:
    """Tell whether numbers in JSON are said to be so many that tritonserver dies of the attempt to make room for them.

    It is back within seconds, as the test below shows; here it would hide whatever else a request can do.
    """
    if not isinstance(body, dict) or not isinstance(body.get("inputs"), list):
        return False
    for tensor in body["inputs"]:
        if not isinstance(tensor, dict) or not isinstance(tensor.get("shape"), list):
            continue
        sizes = [size for size in tensor["shape"] if isinstance(size, int)]
        if math.prod(sizes) * BYTES_OF.get(str(tensor.get("datatype")), 0) > 2**28:
            return True
    return False


@schema.parametrize()
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=EXAMPLES < 100,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.generate),
)
def test_any_request_is_answered_and_kills_nothing(case: schemathesis.Case, server: Running) -> None:
    assume(not declares_more_than_memory(case.body))
    pid = server.tritonserver
    response = case.call(base_url=f"http://127.0.0.1:{server.http}", timeout=TIMEOUT_S)
    assert response.status_code == 200 or response.status_code in REFUSALS, response.status_code
    if "repository" in case.path or "trace" in case.path or "memory" in case.path or "logging" in case.path:
        assert response.status_code != 200, "done without the key"
    # Some refusals of the HTTP library in front say nothing at all; whatever is said is one sentence in JSON.
    elif response.status_code != 200 and response.content:
        assert json.loads(response.content)["error"], response.content
    assert server.tritonserver == pid


def ask(server: Running, body: object) -> int:
    url = f"http://127.0.0.1:{server.http}/v2/models/sentence_embedding/infer"
    return requests.post(url, json=body, timeout=TIMEOUT_S).status_code


def test_after_all_that_a_good_request_is_answered_by_the_same_processes(
    server: Running, at_first: dict[str, float]
) -> None:
    assert ask(server, GOOD) == 200
    assert at_first and read_ends(server) == at_first, "\n".join(server.lines)
    assert server.check().code == 0


def test_numbers_beyond_memory_end_tritonserver_and_it_is_back(server: Running) -> None:
    before = server.read_metrics()["modelyard_tritonserver_restarts_total"]
    # It may have said so at its start already.
    server.read = len(server.lines)
    with pytest.raises(requests.ConnectionError):
        ask(server, {"inputs": [TEXT | {"datatype": "INT64", "shape": [2**40], "data": [1]}]})
    server.wait_for_line("tritonserver answers again", 60)
    assert ask(server, GOOD) == 200
    assert server.read_metrics()["modelyard_tritonserver_restarts_total"] == before + 1
