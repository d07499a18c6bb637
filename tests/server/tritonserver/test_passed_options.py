"""What follows `--` reaches tritonserver, unless the launcher itself decides it."""

import json
import time
import urllib.request
from pathlib import Path

import pytest
from harness import Published, run
from launcher import running

from server.errors import UsageError
from server.tritonserver.passed_options import check_passed_options


def test_tracing_caching_and_metrics_are_tritonservers_to_be_configured(published: Published, tmp_path: Path) -> None:
    traces = tmp_path / "traces.json"
    options = ["--trace-config", f"triton,file={traces}", "--trace-config", "level=TIMESTAMPS"]
    options += ["--trace-config", "rate=1", "--trace-config", "triton,log-frequency=1"]
    options += ["--cache-config=local,size=1048576", "--metrics-config", "summary_latencies=true"]
    with running(published.repository, "--", *options) as server:
        server.read_until("serving HTTP")
        with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics}/metrics", timeout=10) as response:
            metrics = response.read().decode()
        deadline = time.monotonic() + 30
        while not (files := list(tmp_path.glob("traces.json*"))):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert server.stop() == 0
    assert "nv_inference_request_summary_us" in metrics
    assert "nv_cache_util" in metrics
    assert any(entry.get("model_name") == "sentence_embedding" for entry in json.loads(files[0].read_text()))


@pytest.mark.parametrize(
    ("words", "refused", "remedy"),
    [
        (["--http-port", "9000"], "--http-port", "pass --http-port before the --"),
        (["--trace-config", "rate=1", "--model-repository=/srv"], "--model-repository", "pass --repository"),
        (["--http-restricted-api=inference:k=v"], "--http-restricted-api", "control is closed"),
        (["--grpc-restricted-protocol", "x"], "--grpc-restricted-protocol", "control is closed"),
        (["--allow-sagemaker=true"], "--allow-sagemaker", "that port has no key"),
        # The beginning of a name that tritonserver would take for the whole.
        (["--http-header=x"], "--http-header-forward-pattern", "no backend reads other headers"),
        (["--exit-time=0"], "--exit-timeout-secs", "the launcher ends tritonserver"),
    ],
)
def test_what_the_launcher_decides_is_refused_by_name(words: list[str], refused: str, remedy: str) -> None:
    with pytest.raises(UsageError) as refusal:
        check_passed_options(words)
    assert str(refusal.value).startswith(f"{refused} of tritonserver is not handed on: expected an option")
    assert remedy in refusal.value.remedy


def test_a_refused_option_is_wrong_usage_and_a_word_alone_is_not_handed_on(published: Published) -> None:
    done = run("-m", "server", "--repository", str(published.repository), "--", "--host", "0.0.0.0", "--grpc-port=1")
    assert done.code == 2
    assert done.err.startswith("error: --grpc-port of tritonserver is not handed on: ")
    assert done.err.count("\n") == 1
    done = run("-m", "server", "serve", "--", "mode=opentelemetry")
    assert done.code == 2
    assert "got 'mode=opentelemetry'" in done.err


def test_an_option_that_tritonserver_does_not_know_is_named_without_the_list_of_all(published: Published) -> None:
    with running(published.repository, "--", "--no-such-option") as server:
        assert server.process.wait(30) == 1
        server.read_until("error: tritonserver could not start: ")
    assert any("unrecognized option '--no-such-option'" in line for line in server.lines)
    assert len(server.lines) < 10


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("--http-thread-count=abc", 'Bad option: "--http-thread-count".'),
        ("--trace-config=mode=nope", "invalid value for trace mode option: nope"),
    ],
)
def test_a_value_that_tritonserver_cannot_use_is_told_without_the_list_of_all(
    option: str, told: str, published: Published
) -> None:
    with running(published.repository, "--", option) as server:
        assert server.process.wait(30) == 1
        server.read_until("error: tritonserver could not start: ")
    assert any(told in line for line in server.lines)
    assert len(server.lines) < 10


def test_a_cache_that_cannot_be_made_ends_the_start(published: Published) -> None:
    with running(published.repository, "--", "--cache-config=local,size=100MB") as server:
        server.read_until("error: tritonserver started, but serves nothing: expected http://")
        assert server.process.wait(30) == 1
    assert any("Failed to initialize LocalCache" in line for line in server.lines)
