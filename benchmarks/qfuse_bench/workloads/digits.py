"""A small convolutional network that is trained here, on the handwritten digits of scikit-learn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

from qfuse.zoo.weights import seeded

CLASSES = 10
_DEEPEST = 16.0  # ink per pixel
_TRAIN = 1297  # of 1797
_BATCH = 64
_WIDTH = 16
_RATE = 3e-3


@dataclass(frozen=True, slots=True)
class Images:
    """Images with their labels.

    Attributes:
        pixels: float32 [images, 1, 8, 8], from -1 to 1.
        labels: int64 [images].
    """

    pixels: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def part(self, start: int, end: int) -> Images:
        """Return some of them."""
        return Images(self.pixels[start:end], self.labels[start:end])


def read_digits() -> tuple[Images, Images]:
    """Return images to train with and images to test with, which come with the package."""
    found = load_digits()
    pixels = torch.from_numpy(found.images).float()[:, None] / (_DEEPEST / 2) - 1
    every = Images(pixels, torch.from_numpy(found.target).long())
    return every.part(0, _TRAIN), every.part(_TRAIN, len(every))


class DigitsNet(nn.Module):
    """Convolutions with batch norms: a plain one, a residual block, and a depthwise pair."""

    def __init__(self, width: int = _WIDTH) -> None:
        super().__init__()
        self.stem = _norm(nn.Conv2d(1, width, 3, padding=1, bias=False))
        self.first = _norm(nn.Conv2d(width, width, 3, padding=1, bias=False))
        self.second = _norm(nn.Conv2d(width, width, 3, padding=1, bias=False))
        alone = nn.Conv2d(width, width, 3, stride=2, padding=1, groups=width, bias=False)
        self.alone, self.mix = _norm(alone), _norm(nn.Conv2d(width, 2 * width, 1, bias=False))
        self.classifier = nn.Linear(2 * width, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits [batch, 10] for images [batch, 1, 8, 8]."""
        x = functional.relu(self.stem(images))
        x = functional.relu(x + self.second(functional.relu(self.first(x))))
        x = functional.relu(self.mix(functional.relu(self.alone(x))))
        pooled = torch.flatten(functional.adaptive_avg_pool2d(x, 1), 1)
        logits: torch.Tensor = self.classifier(pooled)
        return logits


def _norm(convolution: nn.Conv2d) -> nn.Sequential:
    return nn.Sequential(convolution, nn.BatchNorm2d(convolution.out_channels))


def train(images: Images, steps: int, seed: int = 0) -> DigitsNet:
    """Return a network trained from scratch, in eval mode.

    Args:
        images: What to train with.
        steps: Steps of the optimizer, each on a batch that is drawn at random.
        seed: Seed of the weights and of the batches. Sums of gradients may differ between machines.
    """
    draw = torch.Generator().manual_seed(seed)
    with seeded(seed), _one_thread(), torch.enable_grad():
        model = DigitsNet().train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, total_steps=steps)
        for _ in range(steps):
            some = torch.randint(len(images), (_BATCH,), generator=draw)
            loss = functional.cross_entropy(model(images.pixels[some]), images.labels[some])
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            schedule.step()
    return model.eval().requires_grad_(requires_grad=False)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Run a block with one thread: a second one makes ops as small as these slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def predict(model: Callable[..., torch.Tensor], images: Images) -> torch.Tensor:
    """Return the classes that a model predicts, int64 [images]."""
    with torch.no_grad():
        return model(images.pixels).argmax(1)
