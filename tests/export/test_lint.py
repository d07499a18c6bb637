"""Lint: every rule finds its seeded mistake, and none is found in what tritonserver loads."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import CHECKOUT, Published, run
from launcher import find_ports
from lint_repositories import SEEDS, add_step, tensor, write_good

from export.errors import RepositoryError
from export.lint.backends import BACKENDS
from export.lint.finding import Finding, Level
from export.lint.linter import UNKNOWN_SUPPRESSION, lint
from export.lint.rules import RULES
from export.lint.words import find_nearest
from export.targets import DEFAULT_TARGET, find_target
from server.tritonserver.installation import assemble_backends, build_environment, find_installation

PAGE = (CHECKOUT / "docs" / "lint.md").read_text(encoding="utf-8")
WORDS = {Level.ERROR: "error", Level.WARNING: "warning", Level.NOTE: "note"}


def find(repository: Path, release: str = DEFAULT_TARGET.release) -> list[Finding]:
    return lint(repository, find_target(release))


def test_every_rule_has_a_seeded_mistake_and_a_row_on_the_page() -> None:
    assert list(SEEDS) == list(RULES)
    rows = re.findall(r"^\| `([\w-]+)` \| (\w+) \| (.*?) \| (.*?) \| (.*?) \|$", PAGE, re.MULTILINE)
    written = {name: tuple(cells) for name, *cells in rows}
    assert list(written) == list(RULES)
    for name, rule in RULES.items():
        right = f"`{rule.right}`" if rule.right else "none of it"
        assert written[name] == (WORDS[rule.level], rule.help, f"`{rule.wrong}`", right)


def test_every_backend_of_ours_is_known() -> None:
    assert {path.parent.name for path in CHECKOUT.glob("backends/*/model.py")} <= BACKENDS.keys()


@pytest.mark.parametrize("rule", SEEDS)
def test_a_seeded_mistake_is_found_at_its_place_with_what_to_write(rule: str, tmp_path: Path) -> None:
    SEEDS[rule](tmp_path)
    found = [each for each in find(tmp_path) if each.rule == rule]
    assert found
    for each in found:
        assert each.level == RULES[rule].level
        assert each.instead.split()[0] in {
            *("write", "remove", "put", "make", "give", "copy", "export", "save", "call", "install", "move", "map"),
            *("take", "feed", "add", "correct", "build"),
        }, each.sentence
        assert "\n" not in each.sentence
        if each.path.is_file():
            assert 1 <= each.line <= max(len(each.path.read_bytes().splitlines()), 1)


def test_what_tritonserver_loads_has_no_error(tmp_path: Path) -> None:
    write_good(tmp_path)
    errors = [each.sentence for each in find(tmp_path) if each.level is Level.ERROR]
    assert not errors
    (tmp_path / "bare" / "config.pbtxt").unlink()
    for name, got in (("7", r"config\.pbtxt"), ("bare", "a numbered version")):
        with pytest.raises(RepositoryError, match=f"{name} is a model, not a repository: .* got {got}; pass"):
            find(tmp_path / name)


def test_what_modelyard_publishes_is_clean(published: Published) -> None:
    assert not find(published.repository)


def test_a_field_is_found_on_its_own_line(tmp_path: Path) -> None:
    folder = add_step(tmp_path, "bad", tensor("X", "[ 4 ]"), tensor("Y", "[ 4 ]"))
    text = """backend: "python"  # instance_group { count: 0 }
max_batch_size: 8
parameters { key: "}" value: { string_value: "dims: [" } }
input [
  {
    name: "X"
    data_type: TYPE_FP32
    dims: [
      4,
      0
    ]
  },
  { name: "W" data_type: TYPE_FP32 dims: [ 4 ]
    reshape { shape: [ 3 ] } }
]
output < name: 'Y', data_type: TYPE_FP32; dims: 4 >
dynamic_batching {
  preferred_batch_size: [ 4,
    16 ]
  priority_levels: 1 default_priority_level: 1
  priority_queue_policy { key: 1 value { max_queue_size: 2 } }
  priority_queue_policy {
    key: 9
    value { max_queue_size: 2 }
  }
}
"""
    (folder / "config.pbtxt").write_text(text)
    lines = {each.rule: each.line for each in find(tmp_path)}
    assert lines == {"bad-tensor": 9, "bad-reshape": 14, "preferred-batch": 19, "priority-level": 22}


def test_the_nearest_known_word_is_what_to_write(tmp_path: Path) -> None:
    for rule in ("unknown-field", "unknown-backend", "unknown-platform", "missing-step", "graph-names"):
        SEEDS[rule](tmp_path / rule)
    instead = {
        rule: [e.instead for e in find(tmp_path / rule) if e.rule == rule]
        for rule in SEEDS
        if (tmp_path / rule).exists()
    }
    assert instead == {
        "unknown-field": ["write `max_batch_size`"],
        "unknown-backend": ['write `backend: "onnxruntime"`'],
        "unknown-platform": ['write `platform: "onnxruntime_onnx"`'],
        "missing-step": ['write `model_name: "first"`'],
        "graph-names": ['write `name: "B"`'],
    }


def test_of_names_that_hold_a_word_the_shortest_is_meant() -> None:
    assert find_nearest("ids", ["attention_mask", "input_ids", "token_type_ids"]) == "input_ids"


def test_a_comment_switches_a_rule_off_for_its_model(tmp_path: Path) -> None:
    SEEDS["preferred-batch"](tmp_path)
    config = tmp_path / "bad" / "config.pbtxt"
    config.write_text("# modelyard: ignore=preferred-batch, no-instances\n" + config.read_text())
    assert not find(tmp_path)
    config.write_text("# modelyard: ignore=prefered-batch\n" + config.read_text())
    (finding,) = find(tmp_path)
    assert (finding.rule, finding.instead) == (UNKNOWN_SUPPRESSION, "write `# modelyard: ignore=preferred-batch`")


def add_variant(repository: Path, name: str, variant: str) -> Path:
    """Give a good model a configuration of another name, with a field that nobody knows on its second line."""
    SEEDS["unknown-field"](repository)
    folder = (repository / "bad").rename(repository / name)
    text = (folder / "config.pbtxt").read_text()
    (folder / "config.pbtxt").write_text(text.replace("max_batchsize: 8", ""))
    path = folder / "configs" / f"{variant}.pbtxt"
    path.parent.mkdir()
    path.write_text(f"# for {variant}\n{text}")
    return path


def test_configurations_of_every_name_are_looked_at(tmp_path: Path) -> None:
    path = add_variant(tmp_path, "good", "staging")
    (finding,) = [each for each in find(tmp_path) if each.level is Level.ERROR]
    assert (finding.rule, finding.path) == ("unknown-field", path)
    assert path.read_text().splitlines()[finding.line - 1].startswith("max_batchsize")
    path.write_text((tmp_path / "good" / "config.pbtxt").read_text())
    assert not [each for each in find(tmp_path) if each.level is Level.ERROR]


def test_the_target_decides_what_is_too_new(tmp_path: Path) -> None:
    SEEDS["opset"](tmp_path)
    assert [each.rule for each in find(tmp_path)] == ["opset"]
    assert not find(tmp_path, "25.03")


@pytest.mark.parametrize("name", ["config.pbtxt", "1/model.onnx"])
@pytest.mark.parametrize("kind", ["a pipe", "larger than memory", "nested"])
def test_what_cannot_be_read_is_a_finding_of_its_model_alone(kind: str, name: str, tmp_path: Path) -> None:
    for model in ("bad", "good"):
        (tmp_path / model / "1").mkdir(parents=True)
        (tmp_path / model / "config.pbtxt").write_text(f'name: "{model}" backend: "onnxruntime" max_batch_size: 0')
    path = tmp_path / "bad" / name
    path.unlink(missing_ok=True)
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "nested":
        path.write_text("input {" * 5_000)
    else:
        with path.open("wb") as file:
            file.truncate(5 << 30)
    found = find(tmp_path)
    wanted = "parse-error" if name == "config.pbtxt" else "damaged-graph"
    assert [each.path for each in found if each.rule == wanted] == [path]
    assert [each.model for each in found if each.rule == "missing-model-file" and each.model == "good"] == ["good"]


@pytest.mark.parametrize(
    "content", [b"\x7fELF\x02\x01\x00(\n@8\n:x\n", 'name: "bad"\n'.encode("utf-16"), b"\n\x03bad(\x08"]
)
def test_a_configuration_that_is_no_text_is_one_finding(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "bad" / "1").mkdir(parents=True)
    (tmp_path / "bad" / "config.pbtxt").write_bytes(content)
    (finding,) = find(tmp_path)
    assert finding.rule == "parse-error"
    assert "the configuration cannot be parsed: it is not text; write it in the text form" in finding.sentence


def test_comments_and_strings_may_hold_any_bytes(tmp_path: Path) -> None:
    folder = add_step(tmp_path, "good", tensor("X", "[ 4 ]"), tensor("Y", "[ 4 ]"))
    with (folder / "config.pbtxt").open("ab") as file:
        file.write(b"# K\xf6ln \x1b[0m\nparameters { key: 'a' value { string_value: '\x01' } }\n")
    assert not [each.sentence for each in find(tmp_path) if each.level is Level.ERROR]


@pytest.mark.parametrize("lost", ["embedding_model/1/model.onnx", "embedding_preprocess/1/tokenizer.json"])
def test_a_file_that_was_published_and_is_gone_is_found(lost: str, published: Published, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(published.repository, tmp_path / "models"))
    path = copy / f"sentence_{lost}"
    path.unlink()
    assert path in [each.path for each in find(copy) if each.rule == "missing-model-file"]


@pytest.mark.parametrize("seed", ["parse-error", "python-class", "damaged-graph", "unfed-tensor"])
def test_a_damaged_repository_never_breaks_it(seed: str, tmp_path: Path) -> None:
    SEEDS[seed](tmp_path)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    for path in files:
        whole = path.read_bytes()
        for damaged in (b"", whole[: len(whole) // 2], b"\xff\xfe\x00" + whole, b"{" * 5_000, whole[::-1]):
            path.write_bytes(damaged)
            find(tmp_path)
        path.write_bytes(whole)


def test_the_verb_ends_as_its_help_says_and_writes_for_people_programs_and_github(tmp_path: Path) -> None:
    program = ("-X", "importtime", "-m", "export", "lint")
    SEEDS["no-instances"](tmp_path)
    done = run(*program, str(tmp_path))
    assert done.code == 0
    config = tmp_path / "bad" / "config.pbtxt"
    (line, last) = done.out.splitlines()
    assert line.startswith(f"{config}:5: warning: a group has 0 instances") and line.endswith("[no-instances]")
    assert last == f"{tmp_path}: 1 warning"
    imported = {part.split("|")[-1].strip() for part in done.err.splitlines()}
    assert not imported & {"torch", "onnx", "transformers"}
    assert run("-m", "export", "lint", str(tmp_path), "--strict").code == 1
    SEEDS["gpus-on-cpu"](tmp_path)
    done = run("-m", "export", "lint", str(tmp_path), "--json")
    assert (done.code, json.loads(done.out)["counts"]) == (1, {"error": 1, "warning": 0, "note": 0})
    done = run("-m", "export", "lint", str(tmp_path), "--format", "github")
    assert done.out.startswith(f"::error file={config},line=5,title=gpus-on-cpu::an instance of KIND_CPU has GPUs [0];")
    done = run("-m", "export", "lint", str(tmp_path), "--json", "--format", "github")
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert "argument --format: not allowed with argument --json" in done.err
    done = run("-m", "export", "lint", str(tmp_path / "nowhere"))
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert "there is no repository" in done.err


# Seeds that tritonserver judges without a backend that the machine may lack, and that it survives.
JUDGED = (
    *(
        "parse-error",
        "unknown-field",
        "newer-field",
        "name-mismatch",
        "unknown-platform",
        "platform-clash",
        "no-backend",
    ),
    *(
        "bad-tensor",
        "bad-reshape",
        "missing-labels",
        "no-version",
        "no-served-version",
        "ensemble-form",
        "missing-step",
    ),
    *("step-tensor", "step-input", "unfed-tensor", "ensemble-cycle", "unused-tensor", "made-twice", "step-types"),
    *("step-shapes", "step-batch", "negative-batch", "preferred-batch", "priority-level", "order-clash", "cache-clash"),
    *("gpus-on-cpu", "profile-clash"),
)


# Of which only one model has a configuration.
VARIANT = "staging"


@contextlib.contextmanager
def tritonserver(repository: Path, folder: Path) -> Iterator[int]:
    """Run the bare tritonserver, which completes configurations; yield its port when all models are judged."""
    installation = find_installation()
    for name in ("backends", "empty"):
        (folder / name).mkdir()
    assemble_backends(installation, CHECKOUT / "backends", folder / "backends")
    (port,) = find_ports(1)
    command = [str(installation.executable), f"--model-repository={repository}", "--exit-on-error=false"]
    command += [f"--backend-directory={folder / 'backends'}", "--allow-grpc=false", "--allow-metrics=false"]
    command += [f"--http-port={port}", "--http-address=127.0.0.1", "--exit-timeout-secs=5"]
    command += [f"--model-config-name={VARIANT}"]
    command += ["--pinned-memory-pool-byte-size=0", f"--cache-directory={installation.backends.parent / 'caches'}"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=folder / "empty", env=build_environment(installation), stdout=log, stderr=log
        )
    try:
        deadline = time.monotonic() + 300
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/live"):
                break
            time.sleep(0.1)
        yield port
    finally:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        process.kill()
        process.wait()


def test_lint_and_the_real_tritonserver_agree_on_what_loads(tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    write_good(models)
    for rule in JUDGED:
        SEEDS[rule](tmp_path / rule)
        own = {"bad": f"bad_{rule}"} | ({"second": f"second_{rule}"} if rule in ("step-types", "step-shapes") else {})
        for name, renamed in own.items():
            shutil.copytree(tmp_path / rule / name, models / renamed)
            config = models / renamed / "config.pbtxt"
            text = config.read_text()
            config.write_text(text.replace('"second"', f'"{own["second"]}"') if "second" in own else text)
    add_variant(models, "bad_variant", VARIANT)
    refused = {each.model for each in find(models) if each.level is Level.ERROR}
    with tritonserver(models, tmp_path) as port:
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v2/repository/index", data=b"{}")
        with urllib.request.urlopen(request) as response:
            loaded = {entry["name"] for entry in json.load(response) if entry.get("state") == "READY"}
    everything = {folder.name for folder in models.iterdir()}
    assert refused == {"bad_variant", *(f"bad_{rule}" for rule in JUDGED)}
    assert loaded == everything - refused
