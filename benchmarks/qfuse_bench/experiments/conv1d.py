"""``python -m qfuse_bench.experiments.conv1d``: float conv1d as channels-last conv2d.

Each shape is a convolution and its gelu in bfloat16, as it is and as ``lower-conv1d`` writes it.
Inductor compiles both forms, which are timed in the same interleaved rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

from qfuse.cli.errors import exit_on_error
from qfuse.cli.options import options_of
from qfuse.ir.errors import OptionsError
from qfuse_bench.harness.measure import LEAST_ROUNDS, Series, TimedFunction, measure
from qfuse_bench.harness.progress import watching
from qfuse_bench.harness.stats import Ratio, ratio_of_medians


@dataclass(frozen=True, slots=True, kw_only=True)
class Conv1dOptions:
    """How to measure.

    Attributes:
        rounds: Interleaved rounds per shape.
    """

    rounds: int = field(default=2 * LEAST_ROUNDS, metadata={"help": "rounds per shape"})


@dataclass(frozen=True, slots=True)
class Shape:
    """A convolution of sequences, padded by half its kernel.

    Attributes:
        batch: Sequences.
        length: Positions of each.
        channels: Of the input.
        filters: Channels of the result.
        kernel: Positions that a filter covers.
        stride: Positions between two places of a filter.
        groups: Groups of channels.
    """

    batch: int
    length: int
    channels: int
    filters: int
    kernel: int
    stride: int = 1
    groups: int = 1

    def __str__(self) -> str:
        """Such as ``1 x 80 x 3000 to 768, kernel 3``."""
        text = f"{self.batch} x {self.channels} x {self.length} to {self.filters}"
        text += f", kernel {self.kernel}"
        text += f", stride {self.stride}" if self.stride > 1 else ""
        return text + (f", {self.groups} groups" if self.groups > 1 else "")

    def layer(self) -> torch.nn.Conv1d:
        """Return the convolution in bfloat16, with random weights."""
        layer = torch.nn.Conv1d(
            self.channels,
            self.filters,
            self.kernel,
            stride=self.stride,
            padding=self.kernel // 2,
            groups=self.groups,
        )
        return layer.to(torch.bfloat16).eval()


class Sequences(torch.nn.Module):
    """A convolution as a model has it, and its gelu."""

    def __init__(self, layer: torch.nn.Conv1d) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Convolve ``[batch, channels, length]``."""
        return torch.nn.functional.gelu(self.layer(x))


class Images(Sequences):
    """The same values in the form of the rule: channels-last images of one row."""

    def __init__(self, layer: torch.nn.Conv1d) -> None:
        super().__init__(layer)
        weight = layer.weight.detach().unsqueeze(2)
        self.weight = torch.nn.Buffer(weight.clone(memory_format=torch.channels_last))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Convolve ``[batch, channels, length]``."""
        layer = self.layer
        images = torch.conv2d(
            x.unsqueeze(2).clone(memory_format=torch.channels_last),
            self.weight,
            layer.bias,
            (1, *layer.stride),
            (0, *layer.padding),
            groups=layer.groups,
        )
        sequences = images.squeeze(2).clone(memory_format=torch.contiguous_format)
        return torch.nn.functional.gelu(sequences)


SHAPES: Sequence[Shape] = (
    Shape(1, 3000, 80, 768, 3),
    Shape(1, 4000, 512, 512, 3, stride=2),
    Shape(4, 500, 64, 64, 5),
    Shape(1, 512, 768, 3072, 1),
    Shape(1, 1, 512, 512, 3),
    Shape(1, 500, 512, 512, 31, groups=512),
    Shape(1, 300, 1024, 1024, 4, groups=1024),
    Shape(2, 2000, 64, 64, 3, groups=64),
    Shape(1, 2000, 256, 256, 3, groups=32),
    Shape(1, 200, 768, 768, 128, groups=16),
)
"""Those of Whisper, wav2vec 2.0, Conformer and Mamba, and smaller ones."""


@dataclass(frozen=True, slots=True)
class ShapeTimes:
    """The times of a shape.

    Attributes:
        shape: The shape.
        sequences: Seconds as ``conv1d``.
        images: Seconds as channels-last ``conv2d``.
    """

    shape: Shape
    sequences: Series
    images: Series

    @property
    def ratio(self) -> Ratio:
        """Time of ``conv2d`` as a share of that of ``conv1d``."""
        return ratio_of_medians(self.images.rounds, self.sequences.rounds)


def run_conv1d(
    options: Conv1dOptions, console: Console, shapes: Sequence[Shape] = SHAPES
) -> list[ShapeTimes]:
    """Measure every shape, and print a table.

    Raises:
        OptionsError: There are no rounds.
    """
    if options.rounds < 1:
        raise OptionsError(f"{options.rounds} rounds cannot be measured", fix="ask for at least 1")
    with watching(console, len(shapes)) as watch:
        figures = []
        for shape in shapes:
            watch.say(str(shape))
            figures.append(_measured(shape, options.rounds))
            watch.advance()
    console.print(_table(figures))
    return figures


def _measured(shape: Shape, rounds: int) -> ShapeTimes:
    layer = shape.layer()
    sequences = torch.randn(shape.batch, shape.channels, shape.length, dtype=torch.bfloat16)
    forms = {"conv1d": Sequences(layer), "conv2d": Images(layer)}
    with torch.inference_mode():
        times = measure(
            {
                name: TimedFunction(partial(torch.compile(form), sequences))
                for name, form in forms.items()
            },
            rounds,
        )
    return ShapeTimes(shape, times["conv1d"], times["conv2d"])


def _table(figures: Sequence[ShapeTimes]) -> Table:
    table = Table(
        title=f"conv1d in bfloat16, {torch.get_num_threads()} threads", title_justify="left"
    )
    table.add_column("input to filters")
    for column in ("conv1d, ms", "conv2d, ms", "ratio"):
        table.add_column(column, justify="right")
    for figure in figures:
        ratio = figure.ratio
        table.add_row(
            str(figure.shape),
            f"{figure.sequences.median * 1e3:.3f}",
            f"{figure.images.median * 1e3:.3f}",
            f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]",
        )
    return table


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@options_of(Conv1dOptions)
def main(**given: Any) -> None:
    """Measure what convolving sequences as channels-last images gains."""
    with exit_on_error():
        run_conv1d(Conv1dOptions(**given), Console())


if __name__ == "__main__":
    main()
