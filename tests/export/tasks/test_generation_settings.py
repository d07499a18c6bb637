"""What a checkpoint's `generation_config.json` says: the proof asks both sides for it, and the rest is told."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from trainers.writers import save_writer
from transformers import AutoModelForCausalLM, AutoTokenizer

from export.__main__ import main
from export.artefacts import Artefacts, list_model
from export.engines.openvino_generation import OpenVINOGeneration
from export.pipeline import ExportRequest
from export.progress import Progress
from export.proof.generation import verify_generation
from export.source import load_source
from export.targets import DEFAULT_TARGET
from export.tasks.texts.text_generation import TextGeneration

FOLLOWED = {"repetition_penalty": 1.3, "min_new_tokens": 20}
UNFOLLOWED = {"num_beams": 4, "no_repeat_ngram_size": 2, "forced_eos_token_id": 0}


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | values), encoding="utf-8")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that ends a text early and begins it with what was there, unless it is told not to."""
    folder = save_writer("llama", tmp_path_factory.mktemp("llama") / "checkpoint")
    # What nothing reads beside the other file.
    change(folder / "config.json", no_repeat_ngram_size=1)
    change(folder / "generation_config.json", eos_token_id=[0, *range(100, 400)], **FOLLOWED, **UNFOLLOWED)
    return folder


@pytest.fixture(scope="module")
def version(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("settings") / "models"
    assert main(["run", str(checkpoint), "--name", "writer", "--repository", str(repository)]) == 0
    return repository / "writer" / "1"


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def test_what_is_followed_is_the_default_of_a_request_and_in_the_recorded_texts(
    checkpoint: Path, version: Path
) -> None:
    said = read_json(version / "generation.json")["defaults"]
    assert said == {"max_tokens": 16, "temperature": 0.0, "repetition_penalty": 1.3, "min_tokens": 20}
    tokenizer, model = AutoTokenizer.from_pretrained(checkpoint), AutoModelForCausalLM.from_pretrained(checkpoint)
    neutral = {"num_beams": 1, "no_repeat_ngram_size": 0, "forced_eos_token_id": None, "pad_token_id": 0}
    samples = read_json(version / "golden.json")["samples"]
    assert samples
    for sample in samples:
        asked = {tensor["name"]: tensor["data"][0] for tensor in sample["inputs"]}
        parameters = json.loads(asked["sampling_parameters"])
        assert parameters["repetition_penalty"] == 1.3
        ids = tokenizer(asked["text_input"], return_tensors="pt")
        made = model.generate(**ids, **neutral, max_new_tokens=parameters["max_tokens"])
        # An end within the text is none of it.
        written = [token for token in made[0, ids["input_ids"].shape[1] :] if token not in range(100, 400)]
        assert sample["outputs"][0]["data"] == [tokenizer.decode(written, skip_special_tokens=True)]


def test_the_rest_is_told_with_its_values_and_a_remedy(
    checkpoint: Path, version: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Published already, which is told with what was told then.
    asked = ["run", str(checkpoint), "--name", "writer", "--repository", str(version.parent.parent)]
    assert main([*asked, "--json"]) == 0
    (warning,) = json.loads(capsys.readouterr().out)["warnings"]
    assert warning == (
        "generation_config.json says forced_eos_token_id 0, no_repeat_ngram_size 2, num_beams 4, and what is served "
        "writes its texts without it, otherwise than transformers' generate: remove it from there if that is meant, "
        "or ask with the parameters that docs/generation.md names."
    )
    assert main(asked) == 0
    assert f"Warning: {warning}" in capsys.readouterr().out


def test_what_the_configuration_says_of_texts_is_taken_where_nothing_else_does(tmp_path: Path) -> None:
    """transformers' configurations know nothing of texts any more, and its models read it there all the same."""
    folder = save_writer("gpt2", tmp_path / "checkpoint")
    (folder / "generation_config.json").unlink()
    # A number that need not be whole may be.
    change(folder / "config.json", repetition_penalty=2, min_new_tokens=3, num_beams=3, suppress_tokens=[3])
    task = load_source(
        ExportRequest(checkpoint=folder, name="writer", repository=tmp_path), Progress(Console(quiet=True))
    ).task
    assert isinstance(task, TextGeneration)
    assert task.greedy_defaults == {"repetition_penalty": 2.0, "min_tokens": 3}
    assert isinstance(task.greedy_defaults["repetition_penalty"], float)
    (warning,) = (each for each in task.warnings if "num_beams" in each)
    assert warning.startswith("config.json says num_beams 3, suppress_tokens [3], and what is served writes")
    assert task.ends == [AutoModelForCausalLM.from_pretrained(folder).generation_config.eos_token_id]


def test_an_engine_that_leaves_a_setting_out_is_found(checkpoint: Path, version: Path, tmp_path: Path) -> None:
    request = ExportRequest(checkpoint=checkpoint, name="writer", repository=tmp_path)
    task, engine = load_source(request, Progress(Console(quiet=True))).task, OpenVINOGeneration()
    assert isinstance(task, TextGeneration)
    reference = task.write_reference()
    folder = tmp_path / "version"
    folder.mkdir()
    for path in version.iterdir():
        if path.is_file():
            shutil.copy(path, folder)
    said = read_json(version / "generation.json")

    def write(*without: str) -> list[list[int]]:
        defaults = {name: value for name, value in said["defaults"].items() if name not in without}
        (folder / "generation.json").write_text(json.dumps(said | {"defaults": defaults}), encoding="utf-8")
        return engine.generate(
            folder, [made.prompt for made in reference], max(len(made.written) for made in reference)
        )

    assert write() == [made.written for made in reference]
    assert all(len(tokens) < 20 for tokens in write("min_tokens"))
    assert write("repetition_penalty") != [made.written for made in reference]
    files = Artefacts(model=list_model(folder / engine.model_file))
    report = verify_generation(task=task, files=files, target=DEFAULT_TARGET, engine=engine)
    assert {case.name.split(",")[0] for case in report.cases if not case.passed} == {"texts"}
