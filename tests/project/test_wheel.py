"""The wheel: built with one command, installed into environments of its own, and used from outside the checkout."""

import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from harness import CHECKOUT, Finished, make, run
from launcher import running

PARTS = ("export", "server", "client", "gateway", "backends")
# What is imported by everyone who names no extra, and may not bring anything large with it.
LIGHT = "import sys, modelyard; print(modelyard.__version__, *({'numpy', 'torch', 'grpc'} & sys.modules.keys()))"


@pytest.fixture(scope="module")
def wheel() -> Path:
    done = make("wheel")
    assert done.returncode == 0, done.stdout
    (path,) = (CHECKOUT / "dist").glob("*.whl")
    return path


def make_environment(folder: Path, *arguments: str) -> Path:
    """Make an environment, install into it, and return the folder of its programs."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    install = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    subprocess.run(install, check=True)
    return folder / "bin"


def call(program: Path, *arguments: str, cwd: Path) -> Finished:
    done = subprocess.run([program, *arguments], cwd=cwd, capture_output=True, text=True, check=False)
    return Finished(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the programs of an environment with the wheel and what it asks for without any extra."""
    return make_environment(tmp_path_factory.mktemp("bare") / "env", str(wheel))


@pytest.fixture(scope="module")
def full(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the programs of an environment with the wheel that finds its dependencies where these tests do."""
    folder = tmp_path_factory.mktemp("full") / "env"
    programs = make_environment(folder, "--no-deps", str(wheel))
    ours = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    # Only the folder: files of paths inside of it, such as that of the editable checkout, are not followed.
    Path(ours, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return programs


def test_it_holds_every_file_of_the_parts_and_one_name_at_the_top(wheel: Path) -> None:
    tracked = subprocess.run(["git", "ls-files", *PARTS, "modelyard"], cwd=CHECKOUT, capture_output=True, text=True)
    files = {name for name in tracked.stdout.split() if (CHECKOUT / name).is_file()}
    assert len(files) > 100
    expected = {name if name.startswith("modelyard/") else f"modelyard/{name}" for name in files}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (top_level,) = [name for name in names if name.endswith("top_level.txt")]
        assert archive.read(top_level).decode().split() == ["modelyard"]
    assert expected <= names
    assert {name.split("/")[0] for name in names} == {"modelyard", top_level.split("/")[0]}


def test_the_bare_install_is_the_client_and_light(bare: Path, tmp_path: Path) -> None:
    assert call(bare / "python", "-m", "pip", "check", cwd=tmp_path).out == "No broken requirements found.\n"
    installed = call(bare / "python", "-m", "pip", "list", "--format=freeze", cwd=tmp_path).out
    assert {"modelyard", "tritonclient", "numpy"} <= {line.split("==")[0] for line in installed.splitlines()}
    assert not re.search(r"^(torch|transformers|onnx\w*|nvidia-\w+|tokenizers)==", installed, re.MULTILINE)
    version = (CHECKOUT / "modelyard" / "__init__.py").read_text().split('__version__ = "')[1].split('"')[0]
    assert call(bare / "python", "-c", LIGHT, cwd=tmp_path).out == f"{version}\n"
    code = "from modelyard.client import AsyncClient, Client; print(Client.__module__, AsyncClient.__module__)"
    names = "modelyard.client.synchronous modelyard.client.asynchronous\n"
    assert call(bare / "python", "-c", code, cwd=tmp_path).out == names
    assert call(bare / "modelyard", "--version", cwd=tmp_path).out == f"modelyard {version}\n"
    done = call(bare / "modelyard", "infer", "--url", "localhost:9", "--text", "x", cwd=tmp_path)
    assert done.code == 1
    assert "no server can be reached at localhost:9" in done.err
    assert "start it with `modelyard serve`" in done.err


def test_a_verb_without_its_extra_names_it_in_one_sentence(bare: Path, tmp_path: Path) -> None:
    for verb, extra in (("run", "export"), ("inspect", "export"), ("consolidate", "export"), ("serve", "server")):
        done = call(bare / "modelyard", verb, cwd=tmp_path)
        assert done.code == 1
        beginning = f"error: `modelyard {verb}` cannot run in {bare.parent}: expected what modelyard[{extra}]"
        assert done.err.startswith(beginning)
        assert done.err.endswith(f"; pip install 'modelyard[{extra}]'.\n")
        assert done.err.count("\n") == 1
    # What is installed already is what pip extends, with or without an index that knows the name.
    done = call(bare / "python", "-m", "pip", "install", "--no-index", "--dry-run", "modelyard[server]", cwd=tmp_path)
    # Of all that it needs the first, which is another one for each pip.
    assert re.search(r"No matching distribution found for [\w-]+.*; extra == .server.|for nvidia-pytriton", done.err)


def test_its_help_lists_every_verb_and_each_has_examples_that_name_the_command(full: Path, tmp_path: Path) -> None:
    overview = call(full / "modelyard", "--help", cwd=tmp_path)
    assert overview.code == 0
    verbs = re.findall(r"^  ([a-z][a-z-]+)  ", overview.out, re.MULTILINE)
    assert {"run", "inspect", "consolidate", "serve", "check", "doctor", "infer", "parity", "bench"} <= set(verbs)
    for verb in verbs:
        done = call(full / "modelyard", verb, "--help", cwd=tmp_path)
        assert done.code == 0, done.err
        assert done.out.startswith(f"usage: modelyard {verb} ")
        examples = done.out.split("\nexample", 1)[1]
        assert f"  modelyard {verb}" in examples or f"| modelyard {verb}" in examples
        assert "python" not in done.out
    done = call(full / "modelyard", "sevre", cwd=tmp_path)
    assert done.code == 2
    assert done.err.startswith("error: there is no verb 'sevre': expected one of ")
    assert done.err.endswith("; did you mean serve.\n")


def test_a_checkpoint_is_exported_served_and_asked_outside_the_checkout(
    full: Path, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    work = tmp_path / "work"
    work.mkdir()
    done = call(full / "modelyard", "run", str(tiny_checkpoint), "--name", "tiny", cwd=work)
    assert done.code == 0, done.err
    assert "Next: modelyard serve --repository model_repository" in done.out
    assert (work / "model_repository" / "tiny" / "1" / "verification.html").is_file()
    program = (str(full / "modelyard"), "serve")
    with running(work / "model_repository", program=program, cwd=work) as server:
        server.read_until("Next: modelyard infer --url localhost:")
        server.follow()
        url = f"localhost:{server.http}"
        done = call(full / "modelyard", "infer", "--url", url, "--text", "Hello", "--json", cwd=work)
        assert done.code == 0, done.err
        assert '"text": "Hello"' in done.out
        golden = str(work / "model_repository" / "tiny" / "1" / "golden.json")
        urls = ["--url", url, "--grpc-url", f"localhost:{server.grpc}"]
        done = call(full / "modelyard", "parity", "--golden", golden, *urls, cwd=work)
        assert done.code == 0, done.out + done.err
        done = call(full / "modelyard", "check", "--http-port", str(server.http), cwd=work)
        assert done.code == 0, done.err
    key = tmp_path / "XDG_STATE_HOME" / "modelyard" / "control.key"
    assert key.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in work.iterdir()] == ["model_repository"]


def test_in_a_checkout_the_command_runs_the_code_beside_it(tmp_path: Path) -> None:
    """Whatever else is installed: several checkouts may share one environment."""
    code = "import modelyard.export as e, modelyard.client as c; print(e.__file__, c.__file__)"
    for environment, cwd in (({"PYTHONPATH": str(CHECKOUT)}, tmp_path), ({}, CHECKOUT)):
        done = run("-c", code, cwd=cwd, env=os.environ | environment)
        assert done.out.split() == [str(CHECKOUT / part / "__init__.py") for part in ("export", "client")], done.err
