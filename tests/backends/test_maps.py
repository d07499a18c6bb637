"""The map of a segmentation, tile by tile, beside torch's interpolation of all scores at once."""

import io

import numpy as np
import pytest
import torch
from harness import load_backend
from PIL import Image

maps = load_backend("python_postprocess", "maps")

LABELS = 7


@pytest.mark.parametrize(
    ("grid", "picture"),
    [((16, 24), (301, 457)), ((16, 16), (9, 700)), ((1, 1), (5, 5)), ((40, 30), (20, 31)), ((3, 500), (400, 2))],
    ids=str,
)
def test_each_pixel_has_the_label_that_torch_finds(grid: tuple[int, int], picture: tuple[int, int]) -> None:
    torch.manual_seed(0)
    # Smooth, so that in some tiles one label alone is possible, and in others several are.
    logits = torch.nn.functional.avg_pool2d(torch.randn(1, LABELS, *(size + 4 for size in grid)), 5, stride=1) * 9
    scores = torch.nn.functional.interpolate(logits, size=picture, mode="bilinear", align_corners=False)[0]
    got = maps.find_ids(logits[0].numpy(), *picture)
    best = scores.topk(2, dim=0).values
    is_clear = (best[0] - best[1] > 1e-4).numpy()
    assert is_clear.mean() > 0.99 and (got == scores.argmax(dim=0).numpy())[is_clear].all()


def test_more_labels_than_a_palette_has_colours_are_written_with_16_bits() -> None:
    logits = np.zeros((1, 300, 2, 3), dtype=np.float32)
    logits[0, 299, 0], logits[0, 7, 1] = 1, 1
    settings = {"labels": [f"label {number}" for number in range(300)], "top_k": 3}
    geometry = np.array([[1, 1, 0, 0, 3, 2]], dtype=np.float32)
    made = maps.draw_maps({"logits": logits, "geometry": geometry}, settings)
    image = Image.open(io.BytesIO(made["MAP"][0, 0]))
    assert image.mode == "I;16" and np.asarray(image).tolist() == [[299] * 3, [7] * 3]
    assert made["ID"].tolist() == [[7, 299, -1]] and made["COUNT"].tolist() == [[2]]
    assert made["LABEL"].tolist() == [["label 7", "label 299", ""]] and made["SHARE"].tolist() == [[0.5, 0.5, 0]]


def test_the_palette_is_that_of_pascal_voc() -> None:
    palette = np.array(maps.build_palette()).reshape(256, 3).tolist()
    assert palette[:4] == [[0, 0, 0], [128, 0, 0], [0, 128, 0], [128, 128, 0]]
    assert palette[15] == [192, 128, 128] and len({*map(tuple, palette)}) == 256
