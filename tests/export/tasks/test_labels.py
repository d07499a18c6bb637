"""Answers that are labels: each has a score, and each score a label."""

import pytest
import torch

from export.errors import ModelError
from export.tasks.pictures.answers import LabelAnswers

PICTURE = (1.0, 1.0, 0.0, 0.0, 400.0, 300.0)


def test_the_best_labels_come_first() -> None:
    answers = LabelAnswers(labels=["cat", "crane", "crane"], function="softmax", top_k=2)
    assert answers.answer([torch.tensor([[0.0, 1.0, 2.0]])], PICTURE)["LABEL"] == ["crane", "crane"]


@pytest.mark.parametrize("scores", [2, 4])
def test_more_or_fewer_scores_than_labels_are_refused(scores: int) -> None:
    answers = LabelAnswers(labels=["cat", "dog", "crane"], function="softmax", top_k=1)
    with pytest.raises(ModelError, match=f"expected 3 scores, as id2label in config.json has labels, got {scores}; "):
        answers.answer([torch.zeros(1, scores)], PICTURE)
