"""Rules on what modelyard itself published, and on suppressions."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .finding import Problem
from .model import Model, Repository
from .onnx_file import Graph

_TOKENIZER_FILE = "tokenizer.json"
_PREPROCESS_BACKEND = "python_preprocess"
_PLAN_FACTS = "model.plan.json"


def check_token_ids(model: Model, repository: Repository) -> Iterator[Problem]:
    """Find tokenizers with ids beyond the embedding rows of the graph behind them."""
    steps = model.config.ensemble_scheduling.step
    parts = [repository.models[step.model_name] for step in steps if step.model_name in repository.models]
    for tokenizer in (part for part in parts if part.backend == _PREPROCESS_BACKEND):
        for version in tokenizer.served:
            path = tokenizer.folder / str(version) / _TOKENIZER_FILE
            highest = _find_highest_id(path)
            for other in parts:
                file = other.find_model_file(version)
                graph = other.graphs.get(file) if file else None
                if isinstance(graph, Graph) and 0 < graph.embedding_rows <= highest:
                    yield Problem(
                        path=path,
                        what=f"the tokenizer has the id {highest}, and {other.name} only {graph.embedding_rows} rows",
                        instead="export the model again, with this tokenizer's tokens added",
                    )


def check_plan(model: Model, _: Repository) -> Iterator[Problem]:
    """Find plans of another TensorRT than the target's."""
    serving = model.target.tensorrt_version
    for version in model.served if model.backend == "tensorrt" and serving else ():
        path = model.folder / str(version) / _PLAN_FACTS
        built = _read_object(path).get("tensorrt_version")
        if isinstance(built, str) and serving and not _is_same(built, serving):
            yield Problem(
                path=path,
                what=f"the plan was built by TensorRT {built}, and Triton {model.target.release} has {serving}",
                instead=f"build it in the image of Triton {model.target.release}",
            )


def _is_same(built: str, serving: str) -> bool:
    one, other = built.split("."), serving.split(".")
    known = min(len(one), len(other))
    return one[:known] == other[:known]


def _find_highest_id(path: Path) -> int:
    tokenizer = _read_object(path)
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else list(range(len(vocabulary or ())))
    added = tokenizer.get("added_tokens")
    ids += [token.get("id") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    return max((number for number in ids if isinstance(number, int)), default=-1)


def _read_object(path: Path) -> dict[str, Any]:
    # A pipe would be waited for.
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
