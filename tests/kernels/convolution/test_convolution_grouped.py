"""Int8 convolutions with scales per group of input channels: bit for bit, group by group."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.cases.convolution_kernel import Convolution, convolution, in_format_of, window
from tests.support.cases.fake_kernels import OPCHECKS, to_meta
from tests.support.cases.linear_kernel import STORED
from tests.support.guard_pages import assert_same_with_guards

from qfuse.ir.errors import InputError
from qfuse.kernels import (
    KernelLibrary,
    convolution_w8a8_grouped,
    convolution_w8a8_grouped_quantized,
    instruction_set,
)
from qfuse.kernels.pack_convolution_groups import (
    group_sums,
    pack_channel_groups,
    transposed_group_sums,
)

pytestmark = pytest.mark.numeric

WINDOWS = {
    "1x1": window(1, 1),
    "3x3 padded stride 2": window(3, 3, padding=1, stride=2),
    "padded unevenly": window(2, 3, padding=(3, 0, 0, 2), dilation=2),
    "1d": window(3, padding=1),
    "groups": window(3, 2, groups=2),
    "transposed": window(3, 2, stride=2, output_padding=(1, 0), transposed=True),
    "transposed groups": window(2, 2, stride=3, transposed=True, groups=2),
}
OUTPUT: dict[str, Any] = {
    "out_scale": torch.tensor([0.05]), "out_zero_point": torch.tensor([3]), "quant_min": -128,
    "quant_max": 127, "out_dtype": torch.int8,
}  # fmt: skip


class Grouped:
    """A problem with scales ``[N, groups of input channels]``."""

    def __init__(self, case: Convolution, size: int) -> None:
        self.case, self.size = case, size
        w = case.window
        channels = case.weight.shape[0] // w.groups if w.transposed else case.weight.shape[1]
        self.scale = torch.rand(case.features, channels // size) * 0.01 + 0.003

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        (x, x_scale, x_zero, packed, *_), options = self.case.arguments()
        w, weight = self.case.window, self.case.weight
        if w.transposed:
            sums = transposed_group_sums(weight, self.size, w.stride, w.dilation, w.groups)
        else:
            sums = group_sums(weight, self.size, w.groups)
        taps = int(torch.Size(w.kernel).numel())
        scale = pack_channel_groups(self.scale.repeat(1, taps), w.groups)
        del options["w_zero_point"]
        args = (x, x_scale, x_zero, packed, sums, scale, self.case.features)
        return args, options

    def run(self) -> torch.Tensor:
        args, options = self.arguments()
        return convolution_w8a8_grouped(*args, **options)

    def expected(self) -> torch.Tensor:
        """The sum of the groups in float32, in the order that the op promises."""
        case, w = self.case, self.case.window
        y = torch.zeros(())
        taps = list(itertools.product(*map(range, w.kernel)))
        shape = (-1, *[1] * len(w.kernel))
        for tap in reversed(taps) if w.transposed else taps:
            for group in range(self.scale.shape[1]):
                part = torch.zeros_like(case.weight)
                place: tuple[Any, ...] = (..., *tap)
                part[place] = case.weight[place] * self._channels(group)
                total = replace(case, weight=part).total().float()
                y = y + total * self.scale[:, group].reshape(shape)
        y = y * case.x_scale.reshape(())
        return y if case.bias is None else y + case.bias.reshape(shape)

    def _channels(self, group: int) -> torch.Tensor:
        """One where an input channel is in ``group``."""
        w, weight = self.case.window, self.case.weight
        count = self.scale.shape[1]
        rows = weight.shape[0] if w.transposed else weight.shape[1]
        inside = torch.arange(rows) // self.size % count == group
        return (inside[:, None] if w.transposed else inside[None, :]).to(torch.int8)


def grouped(
    name: str, channels: int, size: int, features: int, dtype: torch.dtype = torch.int8, **kind: Any
) -> Grouped:
    w = WINDOWS[name]
    sizes = (9,) if name == "1d" else (7, 6)
    shape = (2, channels * w.groups, *sizes)
    return Grouped(convolution(shape, features * w.groups, w, dtype=dtype, **kind), size)


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("dtype", STORED)
def test_values(isa: str, name: str, dtype: torch.dtype) -> None:
    del isa
    for index, (channels, size, features) in enumerate(
        ((8, 4, 5), (16, 8, 70), (24, 8, 17), (64, 32, 64))
    ):
        kind = {"zero_point": index % 2 == 0, "bias": index != 2, "last": index < 3}
        case = grouped(name, channels, size, features, dtype, **kind)
        y, expected = case.run(), case.expected()

        assert torch.equal(y, expected)
        batched = case.case.x.dim() == len(case.case.window.kernel) + 2
        assert y.stride() == (in_format_of(case.case.x, y) if batched else y).stride()


def test_epilogues_and_quantized_results(isa: str) -> None:
    del isa
    for name in ("1x1", "3x3 padded stride 2"):
        case = grouped(name, 16, 8, 70)
        args, options = case.arguments()
        y = case.run()
        extra = torch.randn(y.shape)
        options |= {"extras": [extra], "epilogue": "act(relu)|add(0,0.5)"}

        z = convolution_w8a8_grouped(*args, **options)
        q = convolution_w8a8_grouped_quantized(*args, **options, **OUTPUT)

        assert torch.equal(z, torch.relu(y) + extra * 0.5)
        factor = OUTPUT["out_scale"].reciprocal()
        assert torch.equal(q, ((z * factor).round() + 3).clamp(-128, 127).to(torch.int8))


def test_paths_and_threads_agree_bit_for_bit(library: KernelLibrary) -> None:
    case = grouped("3x3 padded stride 2", 32, 8, 130)
    before, results = torch.get_num_threads(), []
    for path in library.instruction_sets:
        with instruction_set(path):
            for threads in (1, 2, 5):
                torch.set_num_threads(threads)
                results.append(case.run())
    torch.set_num_threads(before)

    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("name", ["1x1", "3x3 padded stride 2", "transposed"])
@pytest.mark.parametrize("dtype", STORED)
def test_bounds(isa: str, name: str, dtype: torch.dtype) -> None:
    del isa
    for channels, size, features in ((8, 4, 5), (16, 8, 66)):
        args, options = grouped(name, channels, size, features, dtype).arguments()
        assert_same_with_guards(convolution_w8a8_grouped, args, options)
        assert_same_with_guards(convolution_w8a8_grouped_quantized, args, {**options, **OUTPUT})


@pytest.mark.parametrize("name", ["1x1", "3x3 padded stride 2", "transposed groups"])
def test_opcheck(library: KernelLibrary, name: str) -> None:
    del library
    (*args, features), named = grouped(name, 16, 8, 10).arguments()
    spatial = ("kernel", "stride", "padding", "dilation", "output_padding", "transposed", "groups")
    whole = [
        *args, features, named["bias"], *(named[key] for key in spatial), [], "act(gelu)",
        torch.float32,
    ]  # fmt: skip
    stored = [*OUTPUT.values()]
    ops = torch.ops.qfuse
    torch.library.opcheck(
        ops.convolution_w8a8_grouped.default, (*whole, torch.float32), test_utils=OPCHECKS
    )
    torch.library.opcheck(
        ops.convolution_w8a8_grouped_quantized.default,
        (*whole, *stored[:-1], True, False, stored[-1]),
        test_utils=OPCHECKS,
    )


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (0, torch.zeros(2, 16, 7, 6), "x must be int8 or uint8"),
        (3, torch.zeros(1, 1, 3, 64, 4, dtype=torch.int8), "w_packed must be"),
        (4, torch.zeros(1, 1, 2, 60, dtype=torch.int16), "w_sums must be"),
        (4, torch.zeros(1, 1, 2, 64), "w_sums must be"),
        (5, torch.zeros(10), "w_scale must be"),
        (6, 70, "w_packed must be"),
    ],
)
def test_refuses(library: KernelLibrary, index: int, value: Any, message: str) -> None:
    del library
    args, options = grouped("1x1", 16, 8, 10).arguments()
    changed = [*args]
    changed[index] = value

    with pytest.raises(RuntimeError, match=message):
        convolution_w8a8_grouped(*changed, **options)
    meta = to_meta(changed)
    with pytest.raises(InputError):
        convolution_w8a8_grouped(*meta, **{**options, "bias": None})


def test_refuses_scales_across_taps(library: KernelLibrary) -> None:
    del library
    args, options = grouped("3x3 padded stride 2", 16, 8, 10).arguments()
    three = (torch.zeros(1, 1, 6, 64, dtype=torch.int16), torch.zeros(1, 1, 6, 64))

    with pytest.raises(RuntimeError, match="6 scales of an output channel must each be"):
        convolution_w8a8_grouped(*args[:4], *three, *args[6:], **options)


def test_refuses_groups_that_do_not_divide_the_channels() -> None:
    with pytest.raises(InputError, match="6 input channels cannot be split into groups of 4"):
        group_sums(torch.zeros(3, 6, 1, dtype=torch.int8), 4)
