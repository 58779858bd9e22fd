"""A small animal classifier that judges whether the bundled tiny pipeline drew what it was asked for.

It was trained by `scripts/pretrain_tiny.py` on the same emoji glyphs as the pipeline, but shares no weights with it.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

WEIGHTS = Path(__file__).parent / "assets" / "tiny_classifier.safetensors"

# fmt: off
ANIMALS = (
    "cat", "dog", "horse", "monkey", "rabbit", "zebra", "spider", "bird", "sheep", "deer", "cow", "goat", "lion",
    "tiger", "bear", "raccoon", "fox", "wolf", "lizard", "beetle", "ant", "butterfly", "fish", "shark", "whale",
    "dolphin", "squirrel", "mouse", "rat", "snake", "turtle", "frog", "chicken", "duck", "goose", "bee", "pig",
    "turkey", "fly", "llama", "camel", "bat", "gorilla", "hedgehog", "kangaroo",
)
# fmt: on


class _Block(nn.Module):
    """A residual block that halves the resolution."""

    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(c_in, c_out, 3, stride=2, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(c_out)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(c_out)
        self.skip = nn.Conv2d(c_in, c_out, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm2(self.conv2(F.silu(self.norm1(self.conv1(x)))))
        return F.silu(h + self.skip(F.avg_pool2d(x, 2)))


class TinyClassifier(nn.Module):
    """Maps images, NCHW in [0, 1] at 64x64 pixels, to logits over `ANIMALS`."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 24, 3, padding=1)
        self.blocks = nn.Sequential(_Block(24, 32), _Block(32, 64), _Block(64, 96), _Block(96, 128))
        self.head = nn.Linear(128, len(ANIMALS))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        h = self.blocks(F.silu(self.stem(images * 2 - 1)))
        return self.head(h.amax(dim=(2, 3)))


def load_tiny_classifier() -> nn.Module:
    """Returns the trained classifier in evaluation mode, in single precision."""
    model = TinyClassifier()
    model.load_state_dict({name: weight.float() for name, weight in load_file(WEIGHTS).items()}, strict=True)
    return model.eval()


@torch.no_grad()
def classify(images: torch.Tensor) -> list[str]:
    """Names the animal in each of `images`, NCHW in [0, 1] at 64x64 pixels."""
    return [ANIMALS[i] for i in load_tiny_classifier()(images.float()).argmax(dim=1).tolist()]
