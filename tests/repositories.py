"""Repositories that tests publish to, and whether they can be served."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnx
from harness import Exported, Finished
from tritonclient.grpc import model_config_pb2 as pb

from export.artefacts import hash_file
from export.repository import config_file
from export.repository.names import ModelNames
from export.repository.publication import Publication, publish

NAMES = ModelNames(name="sentence_embedding")


def ask(export_cli: Callable[..., Finished], *words: object) -> dict[str, object]:
    """Return what a verb that succeeds says with --json."""
    done = export_cli(*map(str, words), "--json")
    assert done.code == 0, done.err
    content: dict[str, object] = json.loads(done.out)
    return content


def publish_files(exported: Exported, repository: Path, **changes: object) -> Publication:
    arguments = {
        "repository": repository,
        "names": NAMES,
        "signature": exported.source.task.signature,
        "files": exported.files,
        "report": exported.report,
    }
    return publish(**(arguments | changes))  # type: ignore[arg-type]


def read_config(repository: Path, model_name: str) -> pb.ModelConfig:
    config = config_file.read_config(repository / model_name)
    assert config is not None
    return config


def served(repository: Path, model_name: str) -> list[int]:
    return list(read_config(repository, model_name).version_policy.specific.versions)


def is_consistent(repository: Path) -> bool:
    """Tell whether the ensemble, if it is published, finds every step at the version it names, whole and served."""
    if not (repository / "sentence_embedding" / "config.pbtxt").is_file():
        return True
    steps = read_config(repository, "sentence_embedding").ensemble_scheduling.step
    version = steps[0].model_version
    return (
        served(repository, "sentence_embedding") == [version]
        and (repository / "sentence_embedding" / str(version) / "verification.json").is_file()
        and all(step.model_version in served(repository, step.model_name) for step in steps)
        and all(
            (repository / step.model_name / str(each)).is_dir()
            for step in steps
            for each in served(repository, step.model_name)
        )
        and (repository / "sentence_embedding_model" / str(version) / "model.onnx").stat().st_size > 1000
        and (repository / "sentence_embedding_preprocess" / str(version) / "tokenizer.json").stat().st_size > 1000
    )


def make_other(exported: Exported, folder: Path) -> Exported:
    """Return the same model in other bytes, with a report that vouches for them."""
    model_file = Path(shutil.copytree(exported.model_file.parent, folder)) / "model.onnx"
    model = onnx.load(model_file)
    model.doc_string = "other bytes, same meaning"
    onnx.save(model, model_file)
    report = replace(exported.report, sha256=exported.report.sha256 | {"model.onnx": hash_file(model_file)})
    return replace(exported, files=replace(exported.files, model=(model_file,)), report=report)
