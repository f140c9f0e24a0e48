"""``python -m qfuse_bench.kernels.layers``: convolution layers beside the linear and oneDNN.

Each layer of ResNet-50 and MobileNetV2 that differs in geometry is one row: uint8 activations in
channels-last memory, int8 weights per output channel, ReLU, uint8 result. It is timed in the same
interleaved rounds as the int8 linear of the same product (rows = output pixels), whose rate is what
the tiles reach without gathering pixels, and as oneDNN's convolution.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

from qfuse.cli.errors import exit_on_error
from qfuse.cli.options import options_of
from qfuse.ir.errors import OptionsError
from qfuse.kernels import linear_w8a8_quantized, pack_weight
from qfuse.kernels.convolution_ops import convolution_depthwise_w8a8_quantized as depthwise
from qfuse.kernels.convolution_ops import convolution_w8a8_quantized as convolution
from qfuse.kernels.pack_convolution import convolution_sums, pack_convolution, pack_depthwise
from qfuse_bench.harness.machine import BackgroundLoad, Setting
from qfuse_bench.harness.measure import LEAST_ROUNDS, Series, TimedFunction, compare, measure
from qfuse_bench.harness.own_kernels import load_kernels
from qfuse_bench.harness.stats import Ratio
from qfuse_bench.kernels.cells import Stillness
from qfuse_bench.kernels.contenders import codes, scales
from qfuse_bench.report import format as words
from qfuse_bench.report.outputs import Outputs
from qfuse_bench.report.tables import ratio_text, setting_text

_SECTION = "layers"
_OURS, _LINEAR, _ONEDNN = "qfuse", "linear", "qconv2d"
_X_SCALE, _OUT_SCALE, _ZERO = 0.01, 0.05, 128


@dataclass(frozen=True, slots=True)
class Layer:
    """A 2d convolution of one image, with padding that keeps the size at stride 1.

    Attributes:
        network: Where it is from.
        size: Height and width of the input.
        channels: Input channels.
        out: Output channels.
        kernel: Size of the kernel, 1 to 7.
        stride: Of both axes.
        groups: 1, or ``channels`` for a depthwise convolution.
    """

    network: str
    size: int
    channels: int
    out: int
    kernel: int
    stride: int = 1
    groups: int = 1

    def __str__(self) -> str:
        kind = "depthwise " if self.groups > 1 else ""
        step = f" / {self.stride}" if self.stride > 1 else ""
        size = f"{self.kernel}x{self.kernel}{step}"
        return f"{kind}{size}, {self.channels} -> {self.out}, {self.size} x {self.size}"

    @property
    def pixels(self) -> int:
        """Output pixels."""
        return (-(-self.size // self.stride)) ** 2

    @property
    def depth(self) -> int:
        """Products per output element."""
        return self.kernel**2 * self.channels // self.groups

    @property
    def products(self) -> int:
        """Multiply-adds."""
        return self.pixels * self.depth * self.out


_RESNET = "ResNet-50"
_MOBILE = "MobileNetV2"
LAYERS = (
    Layer(_RESNET, 224, 3, 64, 7, 2),
    Layer(_RESNET, 56, 64, 64, 1),
    Layer(_RESNET, 56, 64, 64, 3),
    Layer(_RESNET, 56, 64, 256, 1),
    Layer(_RESNET, 56, 128, 128, 3, 2),
    Layer(_RESNET, 56, 256, 512, 1, 2),
    Layer(_RESNET, 28, 128, 128, 3),
    Layer(_RESNET, 28, 128, 512, 1),
    Layer(_RESNET, 14, 256, 256, 3),
    Layer(_RESNET, 14, 1024, 256, 1),
    Layer(_RESNET, 7, 512, 512, 3),
    Layer(_RESNET, 7, 512, 2048, 1),
    Layer(_MOBILE, 224, 3, 32, 3, 2),
    Layer(_MOBILE, 112, 32, 32, 3, 1, 32),
    Layer(_MOBILE, 112, 16, 96, 1),
    Layer(_MOBILE, 112, 96, 96, 3, 2, 96),
    Layer(_MOBILE, 56, 144, 24, 1),
    Layer(_MOBILE, 56, 144, 144, 3, 1, 144),
    Layer(_MOBILE, 28, 192, 32, 1),
    Layer(_MOBILE, 14, 384, 64, 1),
    Layer(_MOBILE, 14, 576, 576, 3, 1, 576),
    Layer(_MOBILE, 7, 960, 160, 1),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOptions:
    """What to measure.

    Attributes:
        rounds: Interleaved rounds per layer.
        threads: OpenMP threads; 0 takes torch's default.
        patience: Seconds to wait for other programs to leave the cores, in all.
        json: Where to write everything that was measured.
        page: A page with a section to write the table into.
    """

    rounds: int = field(default=LEAST_ROUNDS, metadata={"help": "interleaved rounds per layer"})
    threads: int = field(default=0, metadata={"help": "threads; 0 takes torch's default"})
    patience: float = field(
        default=60.0, metadata={"help": "seconds to wait for other programs to be quiet, in all"}
    )
    json: Path | None = field(
        default=None, metadata={"help": "write everything that was measured to a file"}
    )
    page: Path | None = field(
        default=None, metadata={"help": "a Markdown page to write the table into"}
    )


@dataclass(frozen=True, slots=True)
class LayerResult:
    """The times of one layer.

    Attributes:
        layer: Its geometry.
        series: Times by contender.
    """

    layer: Layer
    series: Mapping[str, Series]

    @property
    def seconds(self) -> float:
        """The median of qfuse's times."""
        return self.series[_OURS].median

    @property
    def rate(self) -> float:
        """Multiply-adds per second."""
        return self.layer.products / self.seconds

    def share_of_linear(self) -> float | None:
        """Return the linear's time over qfuse's; ``None`` if there is no such linear."""
        linear = self.series.get(_LINEAR)
        return None if linear is None else linear.median / self.seconds

    def ratio(self) -> Ratio | None:
        """Return qfuse's time over oneDNN's."""
        theirs = self.series.get(_ONEDNN)
        return None if theirs is None else compare(self.series[_OURS], theirs)


@dataclass(frozen=True, slots=True)
class LayerResults:
    """A whole run: what it was measured on, and its rows."""

    setting: Setting
    instruction_sets: tuple[str, ...]
    rounds: int
    rows: tuple[LayerResult, ...]
    others: float

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "setting": asdict(self.setting),
            "instruction_sets": list(self.instruction_sets),
            "rounds": self.rounds,
            "others": self.others,
            "layers": [
                {
                    **asdict(row.layer),
                    "seconds": {name: series.rounds for name, series in row.series.items()},
                }
                for row in self.rows
            ],
        }


def contenders(layer: Layer) -> dict[str, Callable[[], torch.Tensor]]:
    """Return qfuse's kernel for a layer and what it is compared with, all on the same numbers."""
    size, pad = layer.size, layer.kernel // 2
    x = (codes(1, layer.channels, size, size).to(torch.int16) + _ZERO).to(torch.uint8)
    x = x.contiguous(memory_format=torch.channels_last)
    weight = codes(layer.out, layer.channels // layer.groups, layer.kernel, layer.kernel)
    w_scale, bias = scales(layer.out), torch.randn(layer.out)
    zero, scale = torch.tensor([_ZERO], dtype=torch.int32), torch.tensor([_X_SCALE])
    stored = {
        "bias": bias,
        "epilogue": "act(relu)",
        "out_scale": torch.tensor([_OUT_SCALE]),
        "out_zero_point": zero,
        "quant_min": 0,
        "quant_max": 255,
        "out_dtype": torch.uint8,
    }
    window = {
        "kernel": [layer.kernel] * 2,
        "stride": [layer.stride] * 2,
        "padding": [pad] * 2,
        "dilation": [1, 1],
    }
    sums, made = convolution_sums(weight), {}
    if layer.groups > 1:
        packed = pack_depthwise(weight)
        made[_OURS] = lambda: depthwise(x, scale, zero, packed, sums, w_scale, **window, **stored)
    else:
        packed = pack_convolution(weight)
        more = {"output_padding": [0, 0]}
        made[_OURS] = lambda: convolution(
            x, scale, zero, packed, sums, w_scale, **window, **more, **stored
        )
        rows = torch.randint(0, 256, (layer.pixels, layer.depth)).to(torch.uint8)
        flat, flat_sums = pack_weight(codes(layer.out, layer.depth))
        made[_LINEAR] = lambda: linear_w8a8_quantized(
            rows, scale, zero, flat, flat_sums, w_scale, **stored
        )
    made[_ONEDNN] = _qconv(layer, x, weight, w_scale, bias)
    return made


def _qconv(
    layer: Layer, x: torch.Tensor, weight: torch.Tensor, w_scale: torch.Tensor, bias: torch.Tensor
) -> Callable[[], torch.Tensor]:
    stride, padding = [layer.stride] * 2, [layer.kernel // 2] * 2
    packed = torch.ops.onednn.qconv_prepack(
        weight, w_scale, _X_SCALE, _ZERO, stride, padding, [1, 1], layer.groups, list(x.shape)
    )
    zeros = torch.zeros(layer.out, dtype=torch.int64)
    op = torch.ops.onednn.qconv2d_pointwise.default
    return lambda: op(
        x, _X_SCALE, _ZERO, packed, w_scale, zeros, bias, stride, padding, [1, 1], layer.groups,
        _OUT_SCALE, _ZERO, torch.uint8, "relu", [], "",
    )  # fmt: skip


def run_layers(
    options: LayerOptions, console: Console | None = None, layers: Sequence[Layer] = LAYERS
) -> LayerResults:
    """Measure, show the table, and write the requested files.

    Raises:
        OptionsError: There are no kernels, or too few rounds.
    """
    console = console or Console()
    if options.rounds < LEAST_ROUNDS or options.threads < 0:
        raise OptionsError(
            f"{options.rounds} rounds with {options.threads} threads cannot be measured",
            fix=f"ask for {LEAST_ROUNDS} rounds or more, and 0 threads or more",
        )
    outputs = Outputs(_SECTION, options.page, options.json)
    library = load_kernels()
    before = torch.get_num_threads()
    torch.set_num_threads(options.threads or before)
    background, stillness, rows = BackgroundLoad(), Stillness(options.patience), []
    try:
        for layer in layers:
            timed = {name: TimedFunction(run) for name, run in contenders(layer).items()}
            series = measure(timed, options.rounds, block_seconds=0.01, before_round=stillness.wait)
            rows.append(LayerResult(layer, series))
        results = LayerResults(
            Setting.here(torch.get_num_threads()),
            library.instruction_sets,
            options.rounds,
            tuple(rows),
            background.share(),
        )
    finally:
        torch.set_num_threads(before)
    _show(results, console)
    outputs.write(results.to_dict(), results=results)
    return results


def _show(results: LayerResults, console: Console) -> None:
    table = Table(title="convolution layers; medians", title_justify="left")
    for column in ("network", "layer", "us", "GMAC/s", "of the linear's rate", "/ qconv2d"):
        table.add_column(column, justify="left" if column in {"network", "layer"} else "right")
    for row in results.rows:
        share = row.share_of_linear()
        table.add_row(
            row.layer.network,
            str(row.layer),
            words.microseconds(row.seconds),
            f"{row.rate / 1e9:.0f}",
            "-" if share is None else f"{share:.0%}",
            ratio_text(row.ratio()),
        )
    console.print(table)
    console.print(setting_text(results.setting, results.rounds, results.others))


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@options_of(LayerOptions)
def main(**given: Any) -> None:
    """Measure convolution layers against the int8 linear and oneDNN."""
    with exit_on_error():
        run_layers(LayerOptions(**given))


if __name__ == "__main__":
    main()
