"""The callers: `client/infer.py`, `client.parity`, `client.bench` and perf_analyzer."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from harness import CHECKOUT, Published, run
from launcher import write_older_golden

from client import perf_analyzer
from client.command.connection import Connection
from client.display import to_table
from client.errors import ClientError
from client.perf_analyzer import PerfAnalyzer, find_perf_analyzer, is_real, measure_texts
from demo.serving import Addresses, serve

INFER = str(CHECKOUT / "client" / "infer.py")
TEXTS = ["--text", "A cat sleeps.", "--text", "A kitten naps.", "--text", "Interest rates rose."]


def test_as_a_plain_script_from_any_folder_it_prints_the_similarities(server: Addresses, tmp_path: Path) -> None:
    done = run(INFER, "--url", server.http, *TEXTS, cwd=tmp_path)
    assert done.code == 0
    assert done.err == ""
    lines = done.out.splitlines()
    assert lines[0].startswith(f"sentence_embedding, version 1, at {server.http} over http: 3 texts in ")
    assert lines[2] == "384 values each; cosine similarities:"
    numbers = [[float(cell) for cell in line.split()[1:4]] for line in lines[5:8]]
    assert numbers[0][0] == numbers[1][1] == 1.0
    assert numbers[0][1] == numbers[1][0] > 0.5 > numbers[0][2]
    assert lines[7].endswith("Interest rates rose.")


def test_as_a_module_over_grpc_it_prints_json_with_every_value(server: Addresses) -> None:
    over_http = run(INFER, "--url", server.http, *TEXTS, "--json")
    over_grpc = run("-m", "client.infer", "--url", server.grpc, "--protocol", "grpc", *TEXTS, "--json")
    assert (over_http.code, over_grpc.code) == (0, 0)
    answers = [json.loads(done.out) for done in (over_http, over_grpc)]
    assert answers[0]["model"] == "sentence_embedding"
    assert [row["text"] for row in answers[0]["results"]] == TEXTS[1::2]
    vectors = [np.array([row["EMBEDDING"] for row in answer["results"]]) for answer in answers]
    assert vectors[0].shape == (3, 384)
    assert np.abs(vectors[0] - vectors[1]).max() < 1e-6


def test_a_file_and_standard_input_give_one_text_a_line(server: Addresses, tmp_path: Path) -> None:
    path = tmp_path / "texts.txt"
    path.write_bytes(b"one\r\n\nthree\x0bhalf\n")
    done = run(INFER, "--url", server.http, "--file", str(path), "--json")
    assert [row["text"] for row in json.loads(done.out)["results"]] == ["one", "", "three\x0bhalf"]
    done = run(INFER, "--url", server.http, "--file", "-", "--json", input="x\ny")
    assert [row["text"] for row in json.loads(done.out)["results"]] == ["x", "y"]
    for blank in ("", "\n", " \n\t\r\n"):
        done = run(INFER, "--url", server.http, "--file", "-", input=blank)
        assert done.code == 1
        assert done.err.startswith("error: there is no text to send: expected --text or lines in --file, got n")


@pytest.mark.parametrize("words", [["--json"], []])
def test_a_reader_that_leaves_ends_it_quietly(server: Addresses, words: list[str]) -> None:
    command = [sys.executable, str(CHECKOUT / "client" / "infer.py"), "--url", server.http, "--text", "x", *words]
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, text=True)
    os.close(writes)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize("words", [["--json"], []])
def test_an_answer_that_nothing_takes_is_told_apart_from_none(server: Addresses, words: list[str]) -> None:
    ask = [sys.executable, INFER, "--url", server.http, "--text", "x", *words]
    with open("/dev/full", "w") as full:  # noqa: PTH123
        done = subprocess.run(ask, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (
        5,
        "error: the answer cannot be written: expected a standard output that takes it, got 'No space left on "
        "device'; send it elsewhere.\n",
    )
    closed = subprocess.run(["bash", "-c", 'exec "$@" >&-', "bash", *ask], stderr=subprocess.PIPE, text=True)
    assert closed.returncode == 5
    assert (
        "the answer cannot be written: expected a standard output that takes it, got 'Bad file descr" in closed.stderr
    )


@pytest.mark.parametrize("command", [[INFER], ["-m", "client.infer"], ["-m", "client.parity"], ["-m", "client.bench"]])
@pytest.mark.parametrize("loaded", ["numpy", "json"])
def test_an_interruption_while_loading_is_no_traceback(command: list[str], loaded: str, tmp_path: Path) -> None:
    # What is loaded from here sends Ctrl-C to the process that loads it.
    (tmp_path / f"{loaded}.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)\n"
    )
    done = run(*command, "--text", "x", env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert (done.code, done.err) == (130, "")


def test_without_a_url_the_environment_names_the_server(server: Addresses) -> None:
    environment = os.environ | {"MODELYARD_URL": server.http, "MODELYARD_GRPC_URL": server.grpc}
    for protocol in ("http", "grpc"):
        done = run(INFER, "--protocol", protocol, "--text", "x", "--json", env=environment)
        assert done.code == 0, done.err
    assert f"default: {server.http}, over gRPC {server.grpc}" in " ".join(
        run(INFER, "--help", env=environment).out.split()
    )


@pytest.mark.parametrize(
    ("protocol", "port"),
    [(ours, port) for ours in ("http", "grpc") for port in ("http", "grpc", "metrics", "status") if port != ours],
)
def test_another_port_of_the_server_is_named_with_the_right_one(server: Addresses, protocol: str, port: str) -> None:
    url, words, usual = getattr(server, port), {"http": "HTTP", "grpc": "gRPC"}, {"http": 8000, "grpc": 8001}
    done = run(INFER, "--url", url, "--protocol", protocol, "--text", "x")
    assert done.code == 1
    assert done.err == (
        f"error: {url} is another port than the one meant: expected the server's {words[protocol]} port, "
        f"got its {words.get(port, port)} port; pass the {words[protocol]} port with --url ({usual[protocol]} unless "
        f"the server was told another)" + (f", or ask with --protocol {port}" if port in words else "") + ".\n"
    )


def test_many_texts_are_shown_with_their_nearest(server: Addresses) -> None:
    texts = [word for index in range(40) for word in ("--text", f"text number {index}")]
    done = run(INFER, "--url", server.http, *texts)
    assert done.code == 0
    assert "nearest  cosine  text" in done.out
    assert done.out.splitlines()[-1].endswith("text number 39")


def test_the_nearest_of_many_texts_are_found_in_little_memory() -> None:
    texts, vectors = [str(index) for index in range(6_000)], np.random.default_rng(0).normal(size=(3_000, 16))
    embeddings = np.repeat(vectors, 2, axis=0).astype(np.float32)
    embeddings[::2] *= 1 + np.arange(16, dtype=np.float32) * 1e-4
    tracemalloc.start()
    try:
        lines = to_table(texts, {"EMBEDDING": embeddings})
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < len(texts) ** 2 * 4
    assert [int(line.split()[1]) - 1 for line in lines[2:]] == [index ^ 1 for index in range(len(texts))]


@contextlib.contextmanager
def listening(answer: bytes | None) -> Iterator[str]:
    """Listen on a port and answer every connection with these bytes, or never."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connections = []

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection = listener.accept()[0]
                    connections.append(connection)
                    if answer is not None:
                        connection.recv(1000)
                        connection.sendall(answer)
                        connection.close()

        threading.Thread(target=accept, daemon=True).start()
        yield f"localhost:{listener.getsockname()[1]}"
        for connection in connections:
            connection.close()


@pytest.mark.parametrize("words", [["-m", "client.infer", "--text", "x"], ["-m", "client.bench"]])
def test_an_interruption_while_asking_is_one_sentence(words: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"localhost:{listener.getsockname()[1]}"
        process = subprocess.Popen([sys.executable, *words, "--url", url], stderr=subprocess.PIPE, text=True)
        listener.settimeout(60)
        connection, _ = listener.accept()
        with connection:
            process.send_signal(signal.SIGINT)
            _, said = process.communicate()
    assert (process.returncode, said) == (130, "error: interrupted before it was done.\n")


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_every_way_of_getting_no_answer_is_one_sentence_and_exit_1(server: Addresses, protocol: str) -> None:
    url = getattr(server, protocol)
    ask = [INFER, "--protocol", protocol, "--text", "x"]
    with listening(None) as silent, listening(b"220 mail.example ESMTP\r\n") as foreign:
        foreigner = {
            "http": f"what answers at {foreign} over http is no server that can be read: expected KServe's protocol",
            "grpc": f"no server can be reached at {foreign} over grpc",
        }
        cases = {
            "no server can be reached at localhost:9 over": ["--url", "localhost:9"],
            "Request for unknown model: 'nope' is not found: expected a model that": ["--url", url, "--model", "nope"],
            "sentence_embedding_model takes no texts: expected one or two inputs of one string a row, got input_ids": [
                "--url",
                url,
                "--model",
                "sentence_embedding_model",
            ],
            "no answer from localhost:": ["--url", silent, "--timeout", "1"],
            foreigner[protocol]: ["--url", foreign, "--timeout", "3"],
            "the server refused the request: in ensemble 'sentence_embedding', TEXT row 1 is not UTF-8": [
                "--url",
                url,
                "--text",
                os.fsdecode(b"\xff"),
            ],
            "nowhere.txt cannot be read": ["--url", url, "--file", "nowhere.txt"],
        }
        for sentence, arguments in cases.items():
            done = run(*ask, *arguments)
            assert done.code == 1, sentence
            assert done.out == ""
            assert done.err.startswith(f"error: {sentence}"), done.err
            assert done.err.endswith(".\n")
            assert done.err.count("\n") == 1
    assert run(INFER, "--url", url).err.startswith("error: there is no text to send")
    too_long = "x" * 300
    assert run(INFER, "--url", url, "--image", too_long).err.startswith(
        f"error: {too_long} cannot be looked at: expect"
    )
    assert run(INFER, "--protocol", "carrier-pigeon").code == 2


def test_without_tritonclient_it_says_what_to_install() -> None:
    python = Path(sys.base_prefix, "bin", f"python3.{sys.version_info[1]}")
    done = subprocess.run([python, "-I", INFER, "--text", "x"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "is not installed for" in done.stderr
    assert "pip install 'tritonclient[http,grpc]' numpy" in done.stderr


def test_as_a_library_it_leaves_what_is_missing_to_whoever_imports_it() -> None:
    python = Path(sys.base_prefix, "bin", f"python3.{sys.version_info[1]}")
    code = "import sys; sys.path.insert(0, sys.argv[1])\ntry: import infer\nexcept ImportError as exc: print(exc.name)"
    command = [python, "-I", "-c", code, str(CHECKOUT / "client")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout in (
        "aiohttp\n",
        "numpy\n",
        "tritonclient\n",
    )


def test_several_ensembles_are_listed_and_the_newest_version_is_asked(published: Published, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    for model in published.repository.iterdir():
        (tmp_path / "models" / model.name).symlink_to(model)
    second = tmp_path / "models" / "another"
    for version in ("9", "10"):
        (second / version).mkdir(parents=True)
    config = (published.repository / "sentence_embedding" / "config.pbtxt").read_text()
    config = config.replace('name: "sentence_embedding"', 'name: "another"')
    (second / "config.pbtxt").write_text(config.replace("versions: 1\n", "versions: 9\n    versions: 10\n", 1))
    with serve(tmp_path / "models") as addresses:
        done = run(INFER, "--url", addresses.http, "--text", "x")
        assert done.code == 1
        assert "expected one, got another, sentence_embedding; choose with --model." in done.err
        done = run(INFER, "--url", addresses.http, "--text", "x", "--model", "another", "--json")
        assert json.loads(done.out)["version"] == "10", "the newest by number, not by letter"


def test_parity_holds_over_every_transport_and_fails_on_another_answer(
    server: Addresses, published: Published, tmp_path: Path
) -> None:
    golden = published.repository / "sentence_embedding" / "1" / "golden.json"
    command = ["-m", "client.parity", "--url", server.http, "--grpc-url", server.grpc, "--model", "sentence_embedding"]
    done = run(*command, "--golden", str(golden), "--json")
    assert done.code == 0, done.err
    results = json.loads(done.out)
    assert [result["transport"] for result in results] == ["HTTP JSON", "HTTP binary", "gRPC"]
    assert all(result["passed"] and result["max_abs_error"] <= 1e-5 and result["texts"] == 32 for result in results)
    content = json.loads(golden.read_text())
    (tmp_path / "golden.json").write_text(json.dumps({**content, "alone": True}))
    done = run(*command, "--golden", str(tmp_path / "golden.json"), "--json")
    assert [result["texts"] for result in json.loads(done.out)] == [16] * 3, "a batch is answered otherwise"
    content["samples"][3]["outputs"][0]["data"][0] += 1e-3
    (tmp_path / "golden.json").write_text(json.dumps(content))
    done = run(*command, "--golden", str(tmp_path / "golden.json"))
    assert done.code == 1
    assert done.out.count("FAILED") == 3


def test_parity_refuses_another_kind_of_model_and_names_only_options_that_it_has(
    server: Addresses, published: Published, tmp_path: Path
) -> None:
    golden = published.repository / "sentence_embedding" / "1" / "golden.json"
    content = json.loads(golden.read_text())
    for sample in content["samples"]:
        sample["outputs"][0]["name"] = "SCORE"
    (tmp_path / "golden.json").write_text(json.dumps(content))
    command = ["-m", "client.parity", "--model", "sentence_embedding", "--golden"]
    done = run(*command, str(tmp_path / "golden.json"), "--url", server.http, "--grpc-url", server.grpc)
    assert (done.code, done.err) == (
        1,
        "error: sentence_embedding is not the model that --golden was recorded of: expected the outputs SCORE, got "
        "EMBEDDING; correct --golden or --model.\n",
    )
    done = run(*command, str(golden), "--url", server.grpc, "--grpc-url", server.grpc)
    assert done.err.endswith("; pass the HTTP port with --url (8000 unless the server was told another).\n")
    done = run(*command, str(golden), "--url", server.http, "--grpc-url", server.http)
    assert done.err.endswith("; pass the gRPC port with --grpc-url (8001 unless the server was told another).\n")
    done = run(*command, str(golden), "--url", "localhost:9")
    assert done.err.endswith("or correct --url.\n")


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_server_that_speaks_no_tls_is_told_from_one_that_is_not_there(server: Addresses, protocol: str) -> None:
    url, title = getattr(server, protocol), {"http": "HTTP", "grpc": "gRPC"}[protocol]
    done = run(INFER, "--url", url, "--protocol", protocol, "--tls", "--text", "x")
    assert (done.code, done.err) == (
        1,
        f"error: {url} speaks no TLS: expected a {title} port that does, got a plain {title} port; leave out --tls, "
        "and https:// in --url.\n",
    )


@pytest.mark.parametrize("output", [False, True])
def test_a_step_is_refused_with_the_model_to_ask(server: Addresses, output: bool, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("x\n")
    words = ["--file", str(tmp_path / "texts.txt"), "--output", str(tmp_path / "out")] if output else ["--text", "x"]
    done = run(INFER, "--url", server.http, "--model", "sentence_embedding_preprocess", *words)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("error: sentence_embedding_preprocess is a step of another model: expected one whose ")
    assert done.err.endswith("; ask sentence_embedding.\n")


def test_the_mark_of_a_file_in_utf_8_is_no_text(server: Addresses, tmp_path: Path) -> None:
    path = tmp_path / "texts.txt"
    path.write_bytes(b"\xef\xbb\xbfone\ntwo\n")
    done = run(INFER, "--url", server.http, "--file", str(path), "--json")
    assert [row["text"] for row in json.loads(done.out)["results"]] == ["one", "two"]
    done = run(INFER, "--url", server.http, "--file", str(path), "--output", str(tmp_path / "out"))
    rows = (tmp_path / "out").read_text().splitlines()
    assert [json.loads(row)["text"] for row in rows] == ["one", "two"], done.err


def test_an_empty_name_of_a_model_is_refused(server: Addresses, published: Published) -> None:
    golden = str(published.repository / "sentence_embedding" / "1" / "golden.json")
    addresses = ["--url", server.http, "--model", ""]
    for words in (
        [INFER, "--text", "x"],
        [INFER, "--prompt", "x"],
        ["-m", "client.parity", "--golden", golden],
        ["-m", "client.bench"],
    ):
        done = run(*words, *addresses)
        sentence = "error: --model is empty: expected the name of a model, got ''; leave it out to ask the one there "
        assert (done.code, done.err) == (1, f"{sentence}is.\n"), words


def test_golden_answers_of_an_older_modelyard_are_refused_with_what_to_do(
    server: Addresses, published: Published, tmp_path: Path
) -> None:
    golden = Path(shutil.copy(published.repository / "sentence_embedding" / "1" / "golden.json", tmp_path))
    write_older_golden(golden)
    command = ["-m", "client.parity", "--url", server.http, "--grpc-url", server.grpc, "--golden", str(golden)]
    done = run(*command, "--model", "sentence_embedding")
    assert (done.code, done.out) == (1, "")
    assert done.err == (
        f"error: {golden} was written by an older modelyard: expected samples of inputs and outputs, got text, "
        "expected; export the model again with `python -m export run`.\n"
    )


@pytest.mark.parametrize(
    ("make", "got"),
    [
        (lambda path: path.write_text("{}"), "JSON without 'samples'"),
        (
            lambda path: path.write_text("[1]"),
            "JSON of another form ('list indices must be integers or slices, not str')",
        ),
        (lambda path: path.write_text("["), "no JSON ('Expecting value: line 1 column 2 (char 1)')"),
        (lambda path: path.write_text("[" * 100_000), "JSON that is nested too deeply"),
        (lambda path: path.symlink_to("/dev/zero"), "no regular file"),
        (os.mkfifo, "no regular file"),
        (lambda path: path.symlink_to(path), "'Too many levels of symbolic links'"),
        (lambda path: None, "'No such file or directory'"),
    ],
)
def test_what_is_no_golden_file_is_refused_in_a_sentence(
    make: Callable[[Path], object], got: str, tmp_path: Path
) -> None:
    golden = tmp_path / "golden.json"
    make(golden)
    done = run("-m", "client.parity", "--golden", str(golden))
    sentence = f"error: {golden} cannot be read: expected a golden.json, got {got}; correct --golden.\n"
    assert (done.code, done.out, done.err) == (1, "", sentence)


def test_a_placeholder_is_not_taken_for_perf_analyzer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the distribution perf-analyzer 0.1.0 installs one."""
    placeholder = tmp_path / "perf_analyzer"
    placeholder.write_text("#!/bin/sh\necho 'Hello, world!'\n")
    placeholder.chmod(0o755)
    assert not is_real(PerfAnalyzer(executable=placeholder, source="test"))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found = find_perf_analyzer()
    assert found.executable != placeholder
    assert is_real(found)


def test_perf_analyzer_is_fetched_without_a_word_and_runs_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(perf_analyzer, "_CACHE", tmp_path / "cache")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    found = find_perf_analyzer()
    assert capfd.readouterr() == ("", "")
    assert found.executable == tmp_path / "cache" / "perf_analyzer"
    version = subprocess.run([found.executable, "--version"], capture_output=True, text=True, check=True)
    assert (version.stdout + version.stderr).startswith("Perf Analyzer Version")


def test_a_perf_analyzer_that_is_not_the_known_one_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perf_analyzer, "_CACHE", tmp_path / "cache")
    monkeypatch.setattr(perf_analyzer, "_WHEEL_SHA256", "0" * 64)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    with pytest.raises(ClientError, match=r"perf_analyzer cannot be fetched: expected pip to download .*HASH"):
        find_perf_analyzer()
    assert not list((tmp_path / "cache").iterdir())


@pytest.mark.parametrize("protocol", ["http", "json", "grpc"])
def test_perf_analyzer_measures_the_ensemble_with_text(server: Addresses, protocol: str) -> None:
    measured = measure_texts(
        find_perf_analyzer(),
        model=Connection(server.http, "http", 10.0).find_model(None),
        url=server.grpc if protocol == "grpc" else server.http,
        protocol=protocol,
        texts=["short", "a text of several words", "naïve café 日本"],
        concurrency=2,
        request_count=20,
    )
    assert measured.inferences_per_s > 0
    assert 0 < measured.p50_ms <= measured.p99_ms


def test_the_benchmark_prints_a_table_and_refuses_without_a_server(server: Addresses) -> None:
    sweep = ["-m", "client.bench", "--concurrency", "1", "--concurrency", "4", "--requests", "20"]
    done = run(*sweep, "--url", server.http, "--grpc-url", server.grpc)
    assert done.code == 0, done.err
    rows = [line.split() for line in done.out.splitlines()]
    assert rows[0][:4] == ["in", "flight", "texts/s", "ratio"]
    assert [row[:2] for row in rows[1:]] == [["http", "1"], ["http", "4"], ["grpc", "1"], ["grpc", "4"]]
    done = run(*sweep, "--url", "localhost:9")
    assert done.code == 1
    assert "no server can be reached at localhost:9" in done.err
