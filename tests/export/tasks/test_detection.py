"""Which answers of a detector are recorded: those that do not hang on the last digits."""

import pytest
import torch

from export.tasks.pictures.detection import BoxAnswers

HERE, NEARBY, FAR = [0.2, 0.2, 0.1, 0.1], [0.2, 0.201, 0.1, 0.1], [0.7, 0.7, 0.1, 0.1]
PICTURE = (1.0, 1.0, 0.0, 0.0, 400.0, 300.0)


def is_clear(*seen: tuple[list[float], tuple[float, ...]], top_k: int = 3) -> bool:
    """Return what is found of boxes and the probabilities of two labels; the rest is that of nothing."""
    boxes = torch.tensor([[box for box, _ in seen]])
    probabilities = torch.tensor([[(*labels, 1 - sum(labels)) for _, labels in seen]])
    return BoxAnswers(["cat", "dog"], top_k, 0.5).is_clear([probabilities.log(), boxes], PICTURE)


def test_scores_that_differ_are_in_an_order() -> None:
    assert is_clear((HERE, (0.8, 0.1)), (FAR, (0.7999, 0.1)), (NEARBY, (0.1, 0.7998)))
    assert is_clear((HERE, (0.3, 0.3)), (FAR, (0.3, 0.3)))


@pytest.mark.parametrize("other", [(FAR, (0.800005, 0.1)), (NEARBY, (0.800005, 0.1)), (HERE, (0.1, 0.800005))])
def test_boxes_that_may_change_places_are_not_recorded(other: tuple[list[float], tuple[float, ...]]) -> None:
    assert not is_clear((HERE, (0.8, 0.1)), other)


def test_the_same_box_twice_may_change_places_with_itself() -> None:
    assert is_clear((HERE, (0.8, 0.1)), (HERE, (0.800005, 0.1)), (FAR, (0.1, 0.7)))


def test_what_is_at_the_threshold_is_not_recorded() -> None:
    assert not is_clear((HERE, (0.8, 0.1)), (FAR, (0.500005, 0.1)))
    assert not is_clear((HERE, (0.8, 0.1)), (FAR, (0.499995, 0.1)))
    assert is_clear((HERE, (0.8, 0.1)), (FAR, (0.4999, 0.1)))


def test_what_is_behind_the_best_hangs_on_nothing_but_its_place() -> None:
    best = (HERE, (0.8, 0.1))
    assert is_clear(best, (FAR, (0.500005, 0.1)), top_k=1)
    assert is_clear(best, (FAR, (0.7, 0.1)), (NEARBY, (0.7, 0.1)), top_k=1)
    assert not is_clear(best, (FAR, (0.800005, 0.1)), top_k=1)


def test_a_box_of_two_labels_as_likely_as_each_other_is_not_recorded() -> None:
    # Beyond a threshold of a half no two are; at the threshold of whoever asks for less they may be.
    boxes = torch.tensor([[HERE, FAR]])
    logits = torch.tensor([[[0.45, 0.1, 0.45], [0.4, 0.4, 0.2]]]).log()
    assert not BoxAnswers(["cat", "dog"], 2, 0.3).is_clear([logits, boxes], PICTURE)
    assert BoxAnswers(["cat", "dog"], 1, 0.3).is_clear([logits, boxes], PICTURE)
