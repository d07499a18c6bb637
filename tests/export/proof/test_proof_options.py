"""Targets, precisions and tolerances, from the command line to what is published and served."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import Finished, fingerprint, needs_newest, run
from safetensors.torch import load_file, save_file
from trainers.architectures import ARCHITECTURES, save_model

from demo.serving import Addresses, serve
from export.__main__ import main
from export.engines import onnxruntime_process
from export.errors import SettingsError
from export.graph import onnx_export
from export.graph.precisions import FP32, PRECISIONS
from export.proof.tolerances import choose_tolerances, scale_tolerances
from export.repository.lockfile import read_lock

EXACT = {"max_abs_error": 1e-5, "min_cosine": 0.999999}


def test_a_precision_is_held_to_what_it_can_keep() -> None:
    assert scale_tolerances(EXACT, FP32) == EXACT
    assert scale_tolerances(EXACT, PRECISIONS["fp16"]) == pytest.approx({"max_abs_error": 1e-3, "min_cosine": 0.9999})
    assert scale_tolerances(EXACT, PRECISIONS["bf16"]) == pytest.approx({"max_abs_error": 2e-2, "min_cosine": 0.999})
    assert scale_tolerances(EXACT, PRECISIONS["int8"]) == {"min_cosine": 0.99}
    assert scale_tolerances({"max_abs_error": 1e-4, "min_label_agreement": 1.0}, PRECISIONS["int8"]) == {
        "min_label_agreement": 0.98
    }


def test_bounds_become_stricter_freely_and_wider_only_with_a_reason() -> None:
    stricter = choose_tolerances(EXACT, FP32, {"max_abs_error": 1e-6}, None)
    assert (stricter.bounds["max_abs_error"], stricter.accepted) == (1e-6, None)
    with pytest.raises(
        SettingsError, match=r"min_cosine is wider .*: expected 0.999999 or stricter, got 0.9; pass --acc"
    ):
        choose_tolerances(EXACT, FP32, {"min_cosine": 0.9}, None)
    wider = choose_tolerances(EXACT, FP32, {"min_cosine": 0.9}, "a demo")
    assert wider.accepted == {"reason": "a demo", "tolerances": {"min_cosine": {"usual": 0.999999, "accepted": 0.9}}}
    with pytest.raises(SettingsError, match="--accept-worse accepts nothing"):
        choose_tolerances(EXACT, FP32, {"max_abs_error": 1e-6}, "a demo")
    with pytest.raises(SettingsError, match="max_error does not apply here: expected one of max_abs_error, min_cosine"):
        choose_tolerances(EXACT, FP32, {"max_error": 1}, None)
    with pytest.raises(SettingsError, match="wider"):
        choose_tolerances(EXACT, FP32, {"max_abs_error": float("nan")}, None)


@pytest.fixture
def export_tiny(export_cli: Callable[..., Finished], tiny_checkpoint: Path, tmp_path: Path) -> Callable[..., Finished]:
    def call(*options: str) -> Finished:
        where = ["--name", "tiny", "--repository", str(tmp_path / "models"), "--json"]
        return export_cli("run", str(tiny_checkpoint), *where, *options)

    return call


@pytest.mark.parametrize(
    ("release", "runtime"),
    [
        pytest.param("25.08", "1.23.0", marks=pytest.mark.rarer),
        pytest.param("26.07", "1.27.0", marks=needs_newest),
    ],
)
def test_another_target_is_proven_under_its_own_onnx_runtime(
    release: str, runtime: str, export_tiny: Callable[..., Finished], tmp_path: Path
) -> None:
    done = export_tiny("--target", release)
    assert done.code == 0, done.err
    report = json.loads(done.out)["report"]
    assert (report["target"], report["versions"]["onnxruntime"]) == (release, runtime)
    lock = read_lock(tmp_path / "models" / "tiny" / "1" / "modelyard.lock.json")
    assert lock["target"]["onnxruntime_version"] == runtime
    assert lock["artefacts"] == report["sha256"]
    # The same bytes for another release are another version: its report and lock name that one.
    again = json.loads(export_tiny().out)
    assert (again["publication"]["version"], again["publication"]["outcome"]) == (2, "created")
    assert again["report"]["sha256"] == report["sha256"]


def test_a_target_whose_onnx_runtime_cannot_be_fetched_is_refused_before_anything_is_read(
    export_cli: Callable[..., Finished], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnxruntime_process, "CACHE", tmp_path / "cache")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    where = ["--name", "tiny", "--repository", str(tmp_path / "models")]
    done = export_cli("run", str(tmp_path / "nowhere"), *where, "--target", "25.08")
    assert done.code == 1
    assert done.err.startswith("error: the ONNX Runtime 1.23.0 of Triton 25.08 cannot be fetched: ")
    assert not (tmp_path / "models").exists()


def test_an_unknown_target_is_refused(export_tiny: Callable[..., Finished], tmp_path: Path) -> None:
    done = export_tiny("--target", "24.9")
    assert done.code == 1
    assert "the target '24.9' is not a known Triton release" in done.err
    assert not (tmp_path / "models").exists()


def test_a_tensorrt_plan_is_refused_where_there_is_none_with_the_command_that_builds_it(
    export_tiny: Callable[..., Finished], tmp_path: Path
) -> None:
    done = export_tiny("--engine", "tensorrt")
    assert done.code == 1
    assert done.err.startswith("error: TensorRT is not installed: expected the package tensorrt, got none; run docker/")
    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize(("precision", "size"), [pytest.param("fp16", 0.55, marks=pytest.mark.rarer), ("bf16", 0.6)])
def test_a_16_bit_file_is_half_as_large_and_proven(
    precision: str, size: float, export_tiny: Callable[..., Finished], tmp_path: Path
) -> None:
    done = export_tiny("--precision", precision)
    assert done.code == 0, done.err
    report = json.loads(done.out)["report"]
    assert report["passed"]
    assert report["precision"]["size_ratio"] < size
    bound = report["tolerances"]["max_abs_error"]
    assert bound > 1e-5
    # A GPU computes in fp16 what the proof computed in fp32, and may use up what is allowed.
    golden = json.loads((tmp_path / "models" / "tiny" / "1" / "golden.json").read_text())
    assert (golden["tolerances"]["max_abs_error"] == bound) == (precision == "fp16")


def test_a_bound_that_is_missed_publishes_nothing_until_it_is_accepted(
    export_tiny: Callable[..., Finished], tmp_path: Path
) -> None:
    done = export_tiny("--tolerance", "max_abs_error=1e-12")
    assert done.code == 1
    assert "is not equal to the checkpoint" in done.err
    assert not (tmp_path / "models").exists()
    done = export_tiny("--precision", "bf16", "--tolerance", "min_cosine=0.9", "--accept-worse", "only a rehearsal")
    assert done.code == 0, done.err
    report = json.loads((tmp_path / "models" / "tiny" / "1" / "verification.json").read_text())
    assert report["accepted_worse"]["reason"] == "only a rehearsal"
    assert "only a rehearsal" in (tmp_path / "models" / "tiny" / "1" / "verification.html").read_text()


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        (["--tolerance", "foo=1"], "the tolerance foo does not apply here: expected one of max_abs_error, min_cosine"),
        (
            ["--tolerance", "max_abs_error=1"],
            "the tolerance max_abs_error is wider than what fp32 is held to",
        ),
        (["--accept-worse", "a demo"], "--accept-worse accepts nothing: expected a --tolerance that is wider"),
    ],
)
def test_bounds_are_judged_before_the_weights_are_read(
    options: list[str], refusal: str, tiny_checkpoint: Path, tmp_path: Path, export_cli: Callable[..., Finished]
) -> None:
    broken = Path(shutil.copytree(tiny_checkpoint, tmp_path / "broken"))
    state = load_file(broken / "model.safetensors")
    save_file({name: value for name, value in state.items() if "LayerNorm" not in name}, broken / "model.safetensors")
    words = ["run", str(broken), "--name", "tiny", "--repository", str(tmp_path / "models")]
    done = export_cli(*words, *options)
    assert done.code == 1 and f"error: {refusal}" in done.err, done.err
    assert "error: the checkpoint lacks weights of BertModel" in export_cli(*words).err


def test_bounds_are_judged_before_the_users_own_code_is_run(
    tmp_path: Path, export_cli: Callable[..., Finished]
) -> None:
    (tmp_path / "model.py").write_text("def build():\n    raise SystemExit('it was run')\n")
    (tmp_path / "inputs.json").write_text('{"inputs": {"x": {"shape": ["batch", 4]}}, "outputs": ["y"]}')
    factory = ["--factory", str(tmp_path / "model.py:build"), "--inputs", str(tmp_path / "inputs.json")]
    where = ["--name", "own", "--repository", str(tmp_path / "models")]
    done = export_cli("run", *factory, *where, "--tolerance", "foo=1")
    assert (
        done.code == 1
        and "error: the tolerance foo does not apply here: expected one of max_relative_error" in done.err
    )


def test_the_same_inputs_give_the_same_lock_and_others_another(
    export_tiny: Callable[..., Finished], tmp_path: Path
) -> None:
    lock = tmp_path / "models" / "tiny" / "1" / "modelyard.lock.json"
    assert export_tiny().code == 0
    first = lock.read_bytes()
    before = fingerprint(tmp_path / "models")
    assert json.loads(export_tiny().out)["publication"]["outcome"] == "unchanged"
    assert fingerprint(tmp_path / "models") == before
    again = tmp_path / "again"
    assert export_tiny("--repository", str(again)).code == 0
    assert (again / "tiny" / "1" / "modelyard.lock.json").read_bytes() == first
    assert b"/" not in first.replace(b"1_Pooling/config.json", b"")


@pytest.fixture(scope="module")
def served(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Addresses]]:
    """Serve a model in int8, and two of tensors."""
    folder = tmp_path_factory.mktemp("proof")
    save_model(ARCHITECTURES["gpt2"], folder / "gpt2")
    save_model(ARCHITECTURES["vit classification"], folder / "vit")
    worse = ["--tolerance", "min_cosine=0.5", "--accept-worse", "random weights"]
    for source, options in (
        (tiny_checkpoint, ["--name", "sentence_embedding", "--precision", "int8", *worse]),
        (folder / "gpt2", ["--name", "writer", "--task", "text-generation-logits-with-past"]),
    ):
        done = run("-m", "export", "run", str(source), *options, "--repository", str(folder / "models"))
        assert done.code == 0, done.err
    # As a large model is published: its weights in a file of their own.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnx_export, "EXTERNAL_ABOVE_BYTES", 0)
        options = ["--task", "image-classification-tensors", "--repository", str(folder / "models")]
        assert main(["run", str(folder / "vit"), "--name", "pictures", *options]) == 0
    assert (folder / "models" / "pictures" / "1" / "model.onnx.data").is_file()
    # The server's own check at its start, of every model's golden answers, has passed when it yields.
    with serve(folder / "models") as addresses:
        yield folder / "models", addresses


@pytest.mark.parametrize("name", ["sentence_embedding", "writer", "pictures"])
def test_the_server_answers_as_verified_over_every_transport(name: str, served: tuple[Path, Addresses]) -> None:
    repository, addresses = served
    golden = repository / name / "1" / "golden.json"
    urls = ["--url", addresses.http, "--grpc-url", addresses.grpc]
    done = run("-m", "client.parity", "--golden", str(golden), *urls, "--json")
    assert done.code == 0, done.err + done.out
    assert [result["passed"] for result in json.loads(done.out)] == [True] * 3


def test_a_changed_answer_of_tensors_is_noticed(served: tuple[Path, Addresses], tmp_path: Path) -> None:
    repository, addresses = served
    content = json.loads((repository / "pictures" / "1" / "golden.json").read_text())
    content["samples"][0]["outputs"][0]["data"][1] += 1.0
    (tmp_path / "golden.json").write_text(json.dumps(content))
    urls = ["--url", addresses.http, "--grpc-url", addresses.grpc, "--model", "pictures"]
    assert run("-m", "client.parity", "--golden", str(tmp_path / "golden.json"), *urls).code == 1
