"""Answers drawn onto a picture, and listed for a terminal."""

from pathlib import Path

import numpy as np
import pytest
from modelyard.client.display import to_table
from modelyard.client.drawing import import_drawing
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
