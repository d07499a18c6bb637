"""Checkpoints by their id on the hub, from a server that speaks its protocol, and by addresses that fsspec opens."""

import hashlib
import json
import os
import pickle
import re
import shutil
import socket
import ssl
import subprocess
import threading
from base64 import b64encode
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import fsspec
import pytest
import torch
from harness import CHECKOUT, Finished, run
from safetensors.torch import load_file

from export import fetching
from export.errors import CheckpointError

NAME = "owner/tiny"
COMMIT = "1f" * 20


class Hub(ThreadingHTTPServer):
    """A hub of one model, which counts what is fetched of it."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fetched: list[str] = []
        self.tag = ""
        self.commit = COMMIT
        super().__init__(("127.0.0.1", 0), Answering)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answering(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.answer(has_body=False)

    def do_GET(self) -> None:
        self.answer(has_body=True)

    def answer(self, *, has_body: bool) -> None:
        if re.fullmatch(rf"/api/models/{NAME}(/revision/(main|v1|{COMMIT}))?", self.path.split("?")[0]):
            files = sorted(str(path.relative_to(self.server.folder)) for path in self.server.folder.rglob("*.*"))
            told = {"id": NAME, "sha": self.server.commit, "siblings": [{"rfilename": name} for name in files]}
            return self.send(200, json.dumps(told).encode(), {"Content-Type": "application/json"})
        match = re.fullmatch(rf"/{NAME}/resolve/(main|v1|{COMMIT})/(.+)", self.path)
        path = self.server.folder / match[2] if match else None
        if path and path.is_file():
            content = path.read_bytes()
            if has_body:
                self.server.fetched.append(match[2])
            told = {"ETag": f'"{self.server.tag or hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
            return self.send(200, content if has_body else b"", told | {"Content-Length": str(len(content))})
        error = "RevisionNotFound" if f"/models/{NAME}/" in self.path else "RepoNotFound"
        return self.send(404, b"{}", {"X-Error-Code": error, "X-Error-Message": "not here"})

    def send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        pass


class Explodes:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch exploded",)


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the small checkpoint, and beside it what others have of the same model."""
    folder = Path(shutil.copytree(tiny_checkpoint, tmp_path_factory.mktemp("hub") / "tiny"))
    for name in ("onnx/model.onnx", "openvino/openvino_model.bin", "tf_model.h5", "README.md", "model.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"of others")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Explodes()))
    return folder


@pytest.fixture
def hub(model: Path) -> Iterator[Hub]:
    with Hub(model) as hub:
        yield hub
        hub.shutdown()


def list_names(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]


def ask(hub: str, home: Path, *words: str, **variables: str) -> Finished:
    # A cache of its own, where the reader's cannot help.
    environment = {**os.environ, "HF_ENDPOINT": hub, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1", **variables}
    environment |= {"PYTHONPATH": str(CHECKOUT)}
    return run("-m", "export", *words, cwd=home, env=environment)


def test_a_model_of_the_hub_is_exported_with_its_commit(hub: Hub, model: Path, tmp_path: Path) -> None:
    done = ask(hub.url, tmp_path, "run", f"{NAME}@v1", "--name", "tiny", "--repository", "models", "--json")
    assert done.code == 0, done.err
    assert f"{NAME}@{COMMIT}: " in done.err
    assert set(hub.fetched) == set(fetching.choose_files(list_names(model)))
    assert "model.safetensors" in hub.fetched and "config.json" in hub.fetched
    assert not {"pytorch_model.bin", "onnx/model.onnx", "model.py"} & set(hub.fetched)
    assert not (tmp_path / "exploded").exists()
    version = tmp_path / "models" / "tiny" / "1"
    lock = json.loads((version / "modelyard.lock.json").read_text())
    assert lock["sources"]["checkpoint"]["address"] == f"{NAME}@{COMMIT}"
    assert json.loads((version / "publication.json").read_text())["checkpoint"] == f"{NAME}@{COMMIT}"
    assert f"{NAME}@{COMMIT}" in (version / "verification.html").read_text()
    again = ask(hub.url, tmp_path, "run", f"{NAME}@v1", "--name", "tiny", "--repository", "models")
    assert again.code == 0 and "nothing was written" in again.out
    count = len(hub.fetched)
    hub.shutdown()
    hub.server_close()
    for variables in ({}, {"HF_HUB_OFFLINE": "1"}):
        done = ask(hub.url, tmp_path, "inspect", f"{NAME}@v1", **variables)
        assert done.code == 0 and done.out.startswith(f"{NAME}@{COMMIT}\n"), done.err
        assert "the copy that was fetched before" in done.err
    assert len(hub.fetched) == count
    done = ask(hub.url, tmp_path, "inspect", "owner/other", HF_HUB_OFFLINE="1")
    assert done.code == 1
    assert "`hf download owner/other --revision main --local-dir FOLDER` where there is a connection, and" in done.err


def test_a_hub_whose_tags_are_paths_writes_nothing(hub: Hub, tmp_path: Path) -> None:
    hub.tag = f"../../../../../../../../../../../../../../..{tmp_path}/escaped"
    done = ask(hub.url, tmp_path, "inspect", NAME)
    assert done.code == 1
    assert "is not fetched: expected a hash as its tag, got '../" in done.err
    assert not (tmp_path / "escaped").exists() and not hub.fetched


def test_a_hub_whose_commits_are_paths_writes_nothing(hub: Hub, tmp_path: Path) -> None:
    hub.commit = f"../../../../../../../../../../../../../../..{tmp_path}/escaped"
    done = ask(hub.url, tmp_path, "inspect", NAME)
    assert done.code == 1
    assert "is not fetched: expected 40 or 64 hexadecimal digits as its commit, got '../" in done.err
    assert not (tmp_path / "escaped").exists() and not hub.fetched


@pytest.mark.rarer
def test_a_folder_here_wins_and_what_is_nowhere_is_refused(hub: Hub, model: Path, tmp_path: Path) -> None:
    (tmp_path / "owner").mkdir()
    shutil.copytree(model, tmp_path / NAME)
    (tmp_path / NAME / "pytorch_model.bin").unlink()
    done = ask(hub.url, tmp_path, "inspect", NAME)
    assert done.code == 0 and done.out.startswith(f"{NAME}\n")
    assert done.err == f"{NAME} is the folder here, not the model of that name on the hub\n"
    assert hub.fetched == []
    for word, sentence in {
        "owner/nothing": "there is no folder owner/nothing here, and no model of that name can be fetched from http",
        f"{NAME}@nothing": "expected a branch, tag or commit nothing, got none; correct what follows the @.",
        "./owner/nothing": "owner/nothing",
        "nothing": "nothing",
    }.items():
        done = ask(hub.url, tmp_path, "inspect", word)
        assert done.code == 1 and sentence in done.err.replace("\n", " "), done.err
    done = ask(hub.url, tmp_path, "consolidate", f"{hub.url}/{NAME}/tree/main", "written")
    assert done.code == 0 and (tmp_path / "written" / "model.safetensors").is_file(), done.err


def test_folders_of_a_store_are_copied_once_for_what_they_hold(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "CACHE", tmp_path)
    store, told = fsspec.filesystem("memory"), []
    store.put(f"{model}/", "/bucket/tiny/", recursive=True)
    (found,) = fetching.fetch_all(["memory://bucket/tiny/"], told.append)
    assert found.address == "memory://bucket/tiny"
    assert {path.name for path in found.path.iterdir()} == set(fetching.choose_files(list_names(model)))
    assert (found.path / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    assert fetching.fetch_all(["memory://bucket/tiny"], told.append) == [found]
    assert told[1] == f"{told[0]}, the copy that was fetched before"
    store.pipe("/bucket/tiny/vocab.txt", b"other")
    (other,) = fetching.fetch_all(["memory://bucket/tiny"], told.append)
    assert other.path != found.path and told[2] == "memory://bucket/tiny: 5 of 11 files"
    (local,) = fetching.fetch_all([f"file://{model}"], told.append)
    assert local.address == f"file://{model}" and (local.path / "config.json").is_file()
    (single,) = fetching.fetch_all([f"file://{model}/model.safetensors"], told.append)
    assert single.path.name == "model.safetensors" and single.path.is_file()
    assert not list((tmp_path / "fetched").glob("staging-*"))
    for url, sentence in {
        "memory://bucket/nothing": "there is nothing at memory://bucket/nothing: expected a folder with a checkpoint",
        "nosuch://key:secret@bucket/x?token=y": "nosuch://bucket/x cannot be fetched: expected a folder",
    }.items():
        with pytest.raises(CheckpointError, match=re.escape(sentence)):
            fetching.fetch_all([url], told.append)


class Listing(SimpleHTTPRequestHandler):
    """Python's own server of a folder, which fails where it is asked to, and counts what is fetched."""

    fetched: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        if self.answers():
            self.fetched.append(self.path)
            super().do_GET()

    def do_HEAD(self) -> None:
        if self.answers():
            super().do_HEAD()

    def answers(self) -> bool:
        first = self.path.split("/")[1]
        if first == "private" and self.headers["Authorization"] in (
            f"Basic {b64encode(b'me:word').decode()}",
            "Bearer it",
        ):
            self.path = self.path.replace("/private", "/tiny", 1)
        elif first.isdigit() or first == "private":
            self.send_error(int(first) if first.isdigit() else 401)
            return False
        elif first == "page":
            self.path = "/page.html"
        return True

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def listing(model: Path) -> Iterator[str]:
    (model.parent / "page.html").write_text("<html><body>Welcome.</body></html>")
    Listing.fetched.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Listing, directory=str(model.parent))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_folders_of_a_web_server_are_fetched_once_for_what_it_says_of_them(
    listing: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "CACHE", tmp_path)
    told: list[str] = []
    (found,) = fetching.fetch_all([f"{listing}/tiny/"], told.append)
    assert {path.name for path in found.path.iterdir()} == set(fetching.choose_files(list_names(model)))
    assert Listing.fetched.count("/tiny/model.safetensors") == 1
    assert fetching.fetch_all([f"{listing}/tiny"], told.append) == [found]
    assert told[1] == f"{told[0]}, the copy that was fetched before"
    assert Listing.fetched.count("/tiny/model.safetensors") == 1
    os.utime(model / "config.json", (1e9, 1e9))
    (other,) = fetching.fetch_all([f"{listing}/tiny"], told.append)
    assert other.path != found.path and told[2] == told[0]
    (single,) = fetching.fetch_all([f"{listing}/tiny/model.safetensors?signed=so"], told.append)
    assert single.path.read_bytes() == (model / "model.safetensors").read_bytes() and "?" not in single.address


def test_what_a_web_server_refuses_is_told_with_what_to_do(listing: str, tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{unused.getsockname()[1]}"
        host = listing.partition("//")[2]
        for url, sentence in {
            f"http://{nobody}/x": f"http://{nobody}/x cannot be fetched: expected a server that answers at {nobody},",
            f"{listing}/401": f"{listing}/401 may not be read: expected leave to read it, got 401 Unauthorized; write",
            f"http://me:secret@{host}/403": f"{listing}/403 may not be read: expected leave to read it, got 403",
            f"{listing}/nothing": f"there is nothing at {listing}/nothing: expected a folder with a checkpoint, got 4",
            f"{listing}/500": f"{listing}/500 cannot be fetched: expected an answer of {host}, got 500 Internal Server",
            f"{listing}/page": f"the page at {listing}/page lists no files of a checkpoint: expected the server's own",
            f"https://{host}/tiny": f"https://{host}/tiny cannot be fetched: expected TLS at {host}, got '",
        }.items():
            done = ask("", tmp_path, "run", url, "--name", "tiny")
            assert done.code == 1 and done.err.startswith(f"error: {sentence}"), done.err
            assert len(done.err.splitlines()) == 1 and "secret" not in done.err


FETCH = "import sys, pathlib; from export import fetching; fetching.CACHE = pathlib.Path(sys.argv[2])\n"
FETCH += "fetching.fetch_all([sys.argv[1]], print)"


def test_both_ways_of_being_let_in_that_a_refusal_names_do(listing: str, tmp_path: Path) -> None:
    url = f"{listing}/private"
    done = ask("", tmp_path, "inspect", url)
    assert done.code == 1 and "got 401 Unauthorized" in done.err
    netrc = tmp_path / "home" / ".netrc"
    netrc.parent.mkdir()
    netrc.write_text("machine 127.0.0.1 login me password word\n")
    netrc.chmod(0o600)
    header = '{"headers": {"Authorization": "Bearer it"}}'
    for variable in ({"HOME": str(netrc.parent)}, {"FSSPEC_HTTP": header}):
        environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), **variable}
        done = run("-c", FETCH, url, str(tmp_path / "cache"), env=environment)
        assert done.code == 0 and done.out.startswith(f"{url}: "), done.err


def test_a_certificate_is_told_from_a_server_and_the_remedy_takes_it(model: Path, tmp_path: Path) -> None:
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    make += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(make, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Listing, directory=str(model.parent))) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"https://localhost:{server.server_address[1]}/tiny"
        done = ask("", tmp_path, "inspect", url)
        assert done.code == 1 and "that this machine trusts, got '" in done.err and "set SSL_CERT_FILE to" in done.err
        environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "SSL_CERT_FILE": str(certificate)}
        done = run("-c", FETCH, url, str(tmp_path / "cache"), env=environment)
        assert done.code == 0, done.err
        server.shutdown()


@pytest.mark.skipif("MODELYARD_STORES" not in os.environ, reason="asks S3's and Google's protocols: `make test-stores`")
def test_stores_are_read_by_their_own_protocols(model: Path, tmp_path: Path) -> None:
    python = Path(os.environ["MODELYARD_STORES"]).absolute()
    (packages,) = python.parent.parent.glob("lib/python*/site-packages")
    command = [str(python), str(CHECKOUT / "tests" / "export" / "stores.py"), str(model)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as stores:
        assert stores.stdout
        addresses = json.loads(stores.stdout.readline())
        variables = {
            **os.environ,
            "PYTHONPATH": f"{CHECKOUT}{os.pathsep}{packages}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_ENDPOINT_URL": addresses["s3"],
            "AWS_DEFAULT_REGION": "us-east-1",
            "STORAGE_EMULATOR_HOST": addresses["gs"],
            # It would ask Google itself over gRPC what kind of bucket it is.
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        }
        for scheme in ("s3", "gs"):
            words = ("-m", "export", "consolidate", f"{scheme}://models/teams/tiny", scheme)
            done = run(*words, cwd=tmp_path, env=variables)
            assert done.code == 0, done.err
            written, wanted = (load_file(folder / "model.safetensors") for folder in (tmp_path / scheme, model))
            assert written.keys() == wanted.keys() and all(torch.equal(written[name], wanted[name]) for name in wanted)
            for url, sentence in {
                f"{scheme}://models/teams/ti": f"there is nothing at {scheme}://models/teams/ti: expected a folder",
                f"{scheme}://nothing/tiny": f"{scheme}://nothing/tiny",
            }.items():
                done = run("-m", "export", "inspect", url, cwd=tmp_path, env=variables)
                assert done.code == 1 and done.err.startswith(f"error: {sentence}"), done.err
                assert len(done.err.splitlines()) == 1, done.err
        stores.communicate("")


def test_files_that_a_reader_looks_at_are_chosen() -> None:
    common = [
        "config.json",
        "tokenizer.json",
        "1_Pooling/config.json",
        "2_Dense/config.json",
        "sentencepiece.bpe.model",
    ]
    dense = ["2_Dense/pytorch_model.bin"]
    others = [
        "README.md",
        ".gitattributes",
        "onnx/model.onnx",
        "openvino/model.xml",
        "rust_model.ot",
        "training_args.bin",
    ]
    pickled = ["pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"]
    safe = ["model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    assert fetching.choose_files([*common, *dense, *others, *pickled, *safe]) == sorted([*common, *dense, *safe])
    assert fetching.choose_files([*common, *others, *pickled]) == sorted([*common, *pickled])
    trainers = ["latest", "global_step5/mp_rank_00_model_states.pt", "pytorch_model.bin"]
    assert set(trainers) < set(fetching.choose_files([*common, *trainers]))
    assert fetching.choose_files(["run.ckpt", "x.onnx"]) == ["run.ckpt"]
