"""A detector of coloured squares whose weights are set by hand, in the manner of YOLO and SSD.

Every 4 pixels it has a place for each colour, which looks at a window of 33 x 33 pixels: the mass of the colour in it
is the area of the box, the middle of that mass its centre. The nearer that is to the place, the surer the place is, so
that several places see each square.
"""

import torch
from torch import Tensor, nn

WINDOW, STRIDE = 33, 4
# The area of the smallest square that counts, in pixels.
_LEAST = 30.0


class SquareDetector(nn.Module):
    """Pixels from 0 to 1 in; boxes, centre and size in pixels, and logits of red, green, blue and nothing out."""

    def __init__(self) -> None:
        super().__init__()
        self.colours = nn.Conv2d(3, 3, 1, bias=False)
        self.colours.weight.data = (1.5 * torch.eye(3) - 0.5)[:, :, None, None]
        offsets = torch.arange(WINDOW) - WINDOW // 2
        down, right = torch.meshgrid(offsets, offsets, indexing="ij")
        kernels = torch.stack([torch.ones(WINDOW, WINDOW), right, down]).float()  # of mass, of its place in x and y
        self.sums = nn.Conv2d(3, 9, WINDOW, stride=STRIDE, padding=WINDOW // 2, groups=3, bias=False)
        self.sums.weight.data = kernels.repeat(3, 1, 1)[:, None]

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """Return boxes, [batch, places, 4], and logits, [batch, places, 4], with nothing as the last label."""
        sums = self.sums(self.colours(image).relu())
        rows, columns = sums.shape[2:]
        mass, right, down = sums.unflatten(1, (3, 3)).unbind(2)  # [batch, colours, rows, columns] each
        x, y = right / (mass + 1e-3), down / (mass + 1e-3)
        edge = mass.sqrt()
        middle_x = x + torch.arange(columns) * float(STRIDE) + 0.5
        middle_y = y + torch.arange(rows)[:, None] * float(STRIDE) + 0.5
        boxes = torch.stack([middle_x, middle_y, edge, edge], dim=-1).flatten(1, 3)
        sure = 6 - 1.5 * (x * x + y * y + 1e-6).sqrt() - (_LEAST - mass).relu()
        # Of the place's own colour, far below 0 of the others, and of nothing the contrary.
        is_own = torch.eye(3)[:, None, None]  # [places' colours, 1, 1, labels]
        logits = sure[..., None] * is_own - 40 * (1 - is_own)
        logits = torch.cat([logits, -sure[..., None]], dim=-1).flatten(1, 3)
        return boxes, logits


def build() -> nn.Module:
    """Return the detector, as `--factory` asks for it."""
    return SquareDetector()


class PartsDetector(SquareDetector):
    """The same with left, top, right and bottom in parts of the pixels, and scores."""

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores, [batch, places, 4], and boxes, [batch, places, 4]."""
        boxes, logits = super().forward(image)
        middles, edges = boxes[..., :2], boxes[..., 2:]
        size = torch.tensor([image.shape[3], image.shape[2]] * 2)
        return logits.sigmoid(), torch.cat([middles - edges / 2, middles + edges / 2], dim=2) / size


def build_parts() -> nn.Module:
    """Return the detector whose boxes are in parts."""
    return PartsDetector()
