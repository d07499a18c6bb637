"""Labels of texts, pictures and sounds: their names, and what makes scores of logits."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import PretrainedConfig

from ..errors import ModelError
from .cases import Outputs
from .comparison import measure_apart

LABEL = "LABEL"
SCORE = "SCORE"

FUNCTIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda logits: logits.softmax(dim=-1),
    "sigmoid": torch.sigmoid,
    "none": lambda logits: logits,
}


def measure_function(function: str, expected: Sequence[Outputs], got: Sequence[Outputs]) -> float:
    """Return how far scores lie apart that a function makes of logits, the first output of each row."""
    wanted, had = ([FUNCTIONS[function](torch.from_numpy(row[0])).numpy() for row in rows] for rows in (expected, got))
    return measure_apart(wanted, had)


def read_labels(config: PretrainedConfig, *, must_differ: bool = True) -> list[str]:
    """Return the names of the labels, by id.

    Args:
        config: The checkpoint's configuration.
        must_differ: Whether no two may have one name.

    Raises:
        ModelError: `id2label` does not name each label once.
    """
    named = {int(index): name for index, name in (config.id2label or {}).items()}
    names = [named[index] for index in sorted(named)]
    # An answer that is not there is an empty text.
    is_whole = names and sorted(named) == [*range(len(names))] and all(map(_is_name, names))
    if not is_whole or (must_differ and len(set(names)) != len(names)):
        raise ModelError(
            "id2label in config.json does not name every label once",
            expected="the ids 0, 1, 2, ... with a name each, a text that is not empty"
            + (" and no other's" if must_differ else ""),
            got=", ".join(f"{index}: {name!r}" for index, name in sorted(named.items())) or "none",
            remedy="give each a name of its own in id2label: answers are names, the best first",
        )
    return names


def _is_name(name: Any) -> bool:
    """Tell whether a label is a text, as numbers are made one when the configuration is read, that has bytes."""
    return isinstance(name, str) and bool(name) and not any("\ud800" <= letter <= "\udfff" for letter in name)


def choose_function(config: PretrainedConfig, beside: Mapping[str, Any] | None = None) -> str:
    """Return what turns logits into scores: `softmax`, `sigmoid` or `none`.

    As transformers' `TextClassificationPipeline` chooses; but a cross-encoder of one score records its own, which
    Sentence-Transformers applies and its users' thresholds are set for.

    Args:
        config: The checkpoint's configuration.
        beside: What Sentence-Transformers recorded in a file of its own.
    """
    if config.num_labels == 1:
        recorded = getattr(config, "sentence_transformers", None)
        activation = recorded.get("activation_fn") if isinstance(recorded, dict) else None
        # As Sentence-Transformers 6 records it, and as releases before 4 did.
        activation = activation or (beside or {}).get("activation_fn")
        activation = activation or getattr(config, "sbert_ce_default_activation_function", None)
        known = {"Identity": "none", "Sigmoid": "sigmoid"}
        name = str(activation).rsplit(".", 1)[-1]
        if name in known:
            return known[name]
    if config.problem_type == "regression":
        return "none"
    if config.problem_type == "multi_label_classification" or config.num_labels == 1:
        return "sigmoid"
    return "softmax"


def count_labels(number: int) -> str:
    """Return in words how many labels there are."""
    return f"{number} label{'' if number == 1 else 's'}"
