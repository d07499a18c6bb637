"""Answers drawn onto a picture, and listed for a terminal."""

from pathlib import Path

import numpy as np
import pytest
from modelyard.client.command.drawing import import_drawing
from modelyard.client.display import to_table
from modelyard.client.errors import ClientError
from PIL import Image

_KEYPOINTS = {
    "LABEL": np.array([b"nose", b"left eye"], object),
    "SCORE": np.array([0.9, 0.8], np.float32),
    "KEYPOINT": np.array([[150.25, 60.5], [-9, 20]], np.float32),
}


def test_keypoints_are_marked_where_they_lie(tmp_path: Path) -> None:
    Image.new("RGB", (200, 100), "white").save(tmp_path / "person.png")
    import_drawing()(tmp_path / "person.png", _KEYPOINTS, tmp_path / "annotated.png")
    drawn = np.asarray(Image.open(tmp_path / "annotated.png"))
    assert drawn[60, 150].tolist() == [0xE6, 0x9F, 0x00]
    # The labels stand beside the places, not in the corner, and a place beyond the picture is not drawn at its edge.
    assert (drawn[:40] == 255).all() and (drawn[:, :140] == 255).all()


@pytest.mark.parametrize("place", [(198, 60), (198, 1), (198, 99), (60, 99), (60, 1), (2, 50)])
def test_labels_of_places_at_an_edge_are_drawn_whole(place: tuple[float, float], tmp_path: Path) -> None:
    """As many pixels as in the middle, but for those of the mark, which is cut or covered."""
    counts = []
    for point in ((100, 50), place):
        found = {**_KEYPOINTS, "LABEL": np.array([b"a nose", b"x"], object)}
        found["KEYPOINT"] = np.array([point, (-9, -9)], np.float32)
        counts.append(int((draw(found, tmp_path) != 255).any(axis=2).sum()))
    assert counts[1] > counts[0] - 20


@pytest.mark.parametrize("corner", [(170, 40), (190, 90), (40, 92), (-20, -20)])
def test_labels_of_boxes_at_an_edge_are_drawn_whole(corner: tuple[float, float], tmp_path: Path) -> None:
    """The field of the label is filled in the colour of the box, as large as in the middle."""
    fields = []
    for left, top in ((60, 30), corner):
        rows, columns = np.nonzero((draw(_box(left, top, 300, 300), tmp_path) == 0).all(axis=2))
        fields.append((np.ptp(rows), np.ptp(columns)))
    assert fields[0] == fields[1] and min(fields[0]) > 3


def test_a_box_beyond_the_picture_is_not_drawn_at_its_edge(tmp_path: Path) -> None:
    for box in ((210, 10, 240, 30), (10, 120, 30, 140), (-30, 10, -5, 30), (10, -30, 30, 0)):
        assert (draw(_box(*box), tmp_path) == 255).all()


def _box(*corners: float) -> dict[str, np.ndarray]:
    return {
        "LABEL": np.array([b"cat"], object),
        "SCORE": np.array([0.9], np.float32),
        "BOX": np.array([corners], np.float32),
        "COUNT": np.array([1]),
    }


def draw(found: dict[str, np.ndarray], folder: Path) -> np.ndarray:
    """Return the pixels of a white picture of 200 x 100 with these answers on it."""
    Image.new("RGB", (200, 100), "white").save(folder / "person.png")
    import_drawing()(folder / "person.png", found, folder / "annotated.png")
    return np.asarray(Image.open(folder / "annotated.png"))


def test_keypoints_are_listed_with_their_places() -> None:
    lines = to_table(["person.png"], {name: values[None] for name, values in _KEYPOINTS.items()})
    assert lines == [
        "    SCORE  LABEL                     KEYPOINT",
        "\n   1  person.png",
        "   0.9000  nose                      150.2 60.5",
        "   0.8000  left eye                  -9.0 20.0",
    ]


def test_vectors_are_not_drawn(tmp_path: Path) -> None:
    Image.new("RGB", (20, 10)).save(tmp_path / "person.png")
    with pytest.raises(ClientError) as caught:
        import_drawing()(tmp_path / "person.png", {"EMBEDDING": np.zeros(4, np.float32)}, tmp_path / "annotated.png")
    assert str(caught.value) == (
        f"--output {tmp_path / 'annotated.png'} cannot be drawn: expected answers with MAP, BOX, KEYPOINT, LABEL, "
        "got EMBEDDING; leave --output out, or ask with --json."
    )
    assert not (tmp_path / "annotated.png").exists()


def test_outputs_of_no_task_of_ours_are_listed_as_they_are() -> None:
    answers = {"H": np.array([[1, 2], [3, 4]]), "N": np.array([[b"one"], [b"two"]], object), "S": np.array([0.5, 1.5])}
    assert to_table(["a", "b"], answers) == [
        "   1  a", "      H: [1, 2]", "      N: ['one']", "      S: 0.5",
        "   2  b", "      H: [3, 4]", "      N: ['two']", "      S: 1.5",
    ]  # fmt: skip
