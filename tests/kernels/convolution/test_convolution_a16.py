"""Weight-only convolutions: exact on whole numbers, near float64 on others."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.cases.convolution_kernel import Window, window
from tests.support.cases.linear_kernel import REAL
from tests.support.cases.weight_only_convolution import (
    WeightOnlyConvolution,
    weight_only_convolution,
)
from tests.support.guard_pages import assert_same_with_guards

from qfuse.ir.ops.epilogue import Epilogue
from qfuse.kernels import KernelLibrary, convolution_w4a16, convolution_w8a16

pytestmark = pytest.mark.numeric

WINDOWS = {
    "1x1": window(1, 1),
    "3x3": window(3, 3),
    "3x3 padded": window(3, 3, padding=1),
    "3x3 padded stride 2": window(3, 3, padding=1, stride=2),
    "3x3 padded after": window(3, 3, padding=(0, 0, 1, 1), stride=2),
    "padded unevenly": window(2, 3, padding=(3, 0, 0, 2)),
    "1x1 stride 2": window(1, 1, stride=2),
    "7x7 padded stride 2": window(7, 7, padding=3, stride=2),
    "dilated one way": window(3, 2, padding=(1, 2), dilation=(1, 3)),
    "tall": window(4, 1, padding=(2, 0), stride=(1, 3)),
    "padding beyond the input": window(2, 2, padding=6, stride=3),
    "transposed": window(3, 3, transposed=True),
    "transposed stride 2": window(3, 2, stride=2, output_padding=(1, 0), transposed=True),
    "transposed phase without taps": window(2, 2, stride=3, padding=1, transposed=True),
    "transposed dilated": window(3, 3, stride=2, dilation=2, transposed=True),
}


def check_exact(*args: Any, **kind: Any) -> None:
    """Check a problem whose numbers need no rounding, bit for bit."""
    case = weight_only_convolution(*args, **kind).whole()
    case.check_same(case.run())


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("bits", [4, 8])
def test_every_window(isa: str, name: str, bits: int) -> None:
    del isa
    sizes = itertools.product((1, 3, 4, 16, 65), (1, 17, 64, 70))
    for index, (channels, features) in enumerate(sizes):
        kind = {"bits": bits, "dtype": REAL[index % 3], "zero_point": index % 2 == 0}

        check_exact((2, channels, 9, 8), features, WINDOWS[name], **kind)


@pytest.mark.parametrize("groups", [2, 3, 5])
@pytest.mark.parametrize("name", ["1x1", "3x3 padded stride 2", "transposed stride 2"])
def test_groups(isa: str, groups: int, name: str) -> None:
    """Groups whose output channels share blocks, straddle them, and fill them."""
    del isa
    w = replace(WINDOWS[name], groups=groups)
    for (channels, features), bits in itertools.product(
        ((2, 1), (4, 3), (5, 24), (8, 64), (3, 70)), (4, 8)
    ):
        shape = (2, channels * groups, 7, 6)

        check_exact(shape, features * groups, w, bits=bits, zero_point=True)


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("multiple", [1, 2, 3])
def test_depthwise(isa: str, name: str, multiple: int) -> None:
    del isa
    for index, channels in enumerate((2, 15, 16, 33, 64, 70)):
        w = replace(WINDOWS[name], groups=channels)
        kind = {"bits": 4 if index % 2 else 8, "dtype": REAL[index % 3], "zero_point": True}

        check_exact((2, channels, 9, 8), channels * multiple, w, **kind)


@pytest.mark.parametrize(
    ("shape", "w"),
    [
        ((3, 4, 40), window(5, padding=2, stride=3)),
        ((4, 12), window(3, padding=1)),
        ((3, 12, 13), window(3, padding=1, groups=12)),
        ((6, 9, 8), window(3, 3, padding=1, groups=2)),
        ((2, 4, 5, 6, 4), window(3, 3, 3, padding=1, stride=2)),
        ((2, 4, 5, 6, 4), window(2, 1, 3, padding=(0, 1, 2), dilation=(3, 2, 1))),
        ((2, 20, 5, 6, 4), window(1, 2, 3, stride=2, groups=20)),
        ((2, 4, 5, 6, 4), window(2, 1, 3, stride=2, transposed=True)),
        ((6, 9), window(4, stride=3, padding=2, transposed=True)),
        ((20, 9, 8), window(3, 3, stride=2, transposed=True, groups=20)),
    ],
    ids=str,
)
@pytest.mark.parametrize("last", [False, True])
def test_every_rank(isa: str, shape: tuple[int, ...], w: Window, *, last: bool) -> None:
    del isa
    features = shape[-1 - len(w.kernel)] * 3
    for dtype, bits in itertools.product(REAL, (4, 8)):
        check_exact(shape, features, w, bits=bits, dtype=dtype, last=last)


@pytest.mark.parametrize("dtype", REAL)
def test_empty(isa: str, dtype: torch.dtype) -> None:
    del isa
    for shape, features in (((0, 6, 9, 8), 10), ((2, 6, 9, 8), 0)):
        case = weight_only_convolution(shape, features, window(3, 3), dtype=dtype)
        assert case.run().shape == (shape[0], features, 7, 6)
    case = weight_only_convolution((2, 0, 9, 8), 10, window(3, 3), dtype=dtype)
    assert case.bias is not None
    expected = case.bias.to(dtype).reshape(-1, 1, 1).expand(2, 10, 7, 6)
    assert torch.equal(case.run(), expected)


@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", ["1x1", "3x3 padded", "transposed stride 2"])
def test_every_granularity(isa: str, name: str, dtype: torch.dtype, bits: int) -> None:
    """Groups of input channels, also more than a panel of weights holds."""
    del isa
    for channels, inputs, groups in ((16, 2, 1), (24, 1, 1), (96, 12, 1), (32, 2, 2), (130, 1, 1)):
        w = replace(WINDOWS[name], groups=groups)
        for zero_point, compute in itertools.product((False, True), (torch.float32, dtype)):
            case = weight_only_convolution(
                (1, channels, 7, 6), 70, w, bits=bits, inputs=inputs, dtype=dtype,
                zero_point=zero_point, bias=not zero_point, compute=compute,
            )  # fmt: skip

            case.check(case.run())


@pytest.mark.parametrize("size", [(1, 1), (1, 7), (6, 16), (13, 29), (20, 30)])
@pytest.mark.parametrize("images", [1, 3])
def test_every_size(isa: str, size: tuple[int, int], images: int) -> None:
    """Rows around tiles and panels, images that share panels."""
    del isa
    for name, dtype in itertools.product(("1x1", "3x3 padded", "3x3 padded stride 2"), REAL):
        check_exact((images, 12, *size), 66, WINDOWS[name], dtype=dtype)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", REAL)
def test_memory_formats(isa: str, dtype: torch.dtype, *, last: bool) -> None:
    """Slices, crops and copies of the input are read right."""
    del isa
    for name, channels, groups in (("1x1", 4, 1), ("3x3 padded", 6, 1), ("3x3 padded", 6, 6)):
        w = replace(WINDOWS[name], groups=groups)
        kind: dict[str, Any] = {"dtype": dtype, "last": last}
        case = weight_only_convolution((3, channels, 6, 5), 12, w, **kind).whole()
        wide = weight_only_convolution((3, channels + 7, 9, 8), 1, WINDOWS["1x1"], **kind).whole().x
        views = (
            case.x,
            wide[:, 3 : 3 + channels, :6, :5],
            wide[:, :channels, 1:7, 2:7],
            wide[::2, :channels, ::2, ::2],
            wide[:, :channels].transpose(2, 3),
            case.x[:1].expand(3, -1, -1, -1),
            case.x[:, :, :1, :1].expand(-1, -1, 6, 5),
            case.x[:, :, :1, :1],
        )
        for x in views:
            if min(x.shape[2:]) > 1 or name == "1x1":
                one = replace(case, x=x)
                one.check_same(one.run())


def test_threads_do_not_change_a_bit(isa: str) -> None:
    del isa
    before = torch.get_num_threads()
    cases = [
        weight_only_convolution((2, 20, 19, 17), 130, WINDOWS["3x3 padded"], dtype=dtype)
        for dtype in REAL
    ]
    cases.append(weight_only_convolution((2, 70, 19, 40), 70, window(3, 3, groups=70)))
    cases.append(weight_only_convolution((2, 130, 3, 3), 130, WINDOWS["transposed stride 2"]))
    for case in cases:
        results = []
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            results.append(case.run())
        torch.set_num_threads(before)

        assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("groups", [1, 70])
@pytest.mark.parametrize("last", [False, True])
def test_the_epilogue_is_the_same(isa: str, dtype: torch.dtype, groups: int, *, last: bool) -> None:
    del isa
    w = window(3, 3, padding=1, groups=groups)
    case = weight_only_convolution((2, 70, 6, 5), 70, w, dtype=dtype, last=last)
    extras = [torch.randn(2, 70, 6, 5), torch.randn(2, 70, 1, 1)]
    text = "act(relu)|mul(0)|cast(bfloat16)|add(1,1.0)"

    y = case.run(extras=extras, epilogue=text, out_dtype=torch.float32)

    assert torch.equal(y, Epilogue.parse(text).apply(case.run(), extras))


@pytest.mark.parametrize("groups", [1, 6])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_in_its_pixels_and_groups(
    isa: str, groups: int, value: float
) -> None:
    """Also next to the padding of the weight, whose undefined values are not multiplied."""
    del isa
    for channels in (6, 18):
        w = window(3, 3, padding=1, groups=groups)
        case = weight_only_convolution((1, channels, 9, 8), 12, w, zero_point=True)
        case.x[0, 1, 4, 4] = value
        near = torch.zeros(1, 12, 9, 8, dtype=torch.bool)
        group = channels // groups
        first = 1 // group * (12 // groups)
        near[0, first : first + 12 // groups, 3:6, 3:6] = True

        y = case.run()

        assert y[~near].isfinite().all()
        assert not y[near].isfinite().any()


def test_inputs_are_not_written_to(isa: str) -> None:
    del isa
    case = weight_only_convolution((2, 6, 7, 7), 70, WINDOWS["3x3 padded"], zero_point=True)
    args, options = case.arguments()
    tensors = [a for a in (*args, *options.values()) if isinstance(a, torch.Tensor)]
    before = [t.clone() for t in tensors]

    first, second = case.run(), case.run()

    assert torch.equal(first, second)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


@pytest.mark.parametrize("name", ["1x1", "3x3 padded", "transposed stride 2"])
@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("last", [False, True])
def test_bounds(isa: str, name: str, dtype: torch.dtype, *, last: bool) -> None:
    del isa
    for (channels, features, groups), bits in itertools.product(
        ((1, 1, 1), (3, 5, 1), (17, 63, 1), (8, 66, 2), (6, 6, 6), (6, 12, 6)), (4, 8)
    ):
        w = replace(WINDOWS[name], groups=groups)
        case = weight_only_convolution(
            (2, channels, 5, 6), features, w, bits=bits, dtype=dtype, zero_point=True, last=last
        )
        extras = [torch.randn(case.run().shape), torch.randn(features, 1, 1)]
        wide = torch.nn.functional.pad(case.x.permute(0, 2, 3, 1), (2, 3))
        op = convolution_w4a16 if bits == 4 else convolution_w8a16
        for x in (case.x, wide[..., 2:-3].permute(0, 3, 1, 2)):
            args, options = replace(case, x=x).arguments()
            options |= {"extras": extras, "epilogue": "act(gelu)|add(0,0.5)|mul(1)"}
            assert_same_with_guards(op, args, {**options, "out_dtype": torch.float32})


def test_scales_may_be_one_per_channel(isa: str) -> None:
    del isa
    case = weight_only_convolution((2, 6, 7, 7), 70, WINDOWS["3x3 padded"], zero_point=True)
    (x, packed, _), options = case.arguments()
    assert case.zero_point is not None
    options |= {"w_zero_point": case.zero_point[:, 0], "out_channels": None}

    y = convolution_w8a16(x, packed, case.scale[:, 0], **options)

    assert torch.equal(y, case.run())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(1, 4, 5, 5, dtype=torch.int8)}, "x must be float32"),
        ({"x": torch.zeros(1, 5, 5, 5)}, "w_packed must be"),
        ({"x": torch.zeros(5, 5)}, "x has 2 axes, expected 3 or 4"),
        ({"x": torch.zeros(1, 4, 2, 5)}, "the kernel reaches over 3 pixels"),
        ({"w_packed": torch.zeros(1, 9, 64, 4, dtype=torch.uint8)}, "w_packed of 8 bits cannot"),
        ({"w_scale": torch.ones(4)}, "w_scale has 4 elements"),
        ({"w_scale": torch.ones(6, dtype=torch.int32)}, "w_scale has type Int"),
        ({"w_scale": torch.ones(1, 9, 64)}, "groups, and weights with offsets"),
        ({"w_zero_point": torch.ones(6, dtype=torch.int32)}, "w_zero_point has type Int"),
        ({"out_channels": 70}, "w_packed must be"),
        ({"bias": torch.ones(4)}, "bias has 4 elements"),
        ({"out_dtype": torch.bfloat16}, "the epilogue gives Float"),
        ({"kernel": [3]}, "stride has 2 numbers, expected 1"),
        ({"groups": 4}, "cannot be split into 4 groups"),
        ({"kernel": [3, 2]}, "w_packed must be"),
        ({"epilogue": "glu(silu,gate-first)"}, "does not support GLU"),
    ],
)
def test_refuses(library: KernelLibrary, change: dict[str, Any], message: str) -> None:
    del library
    case = weight_only_convolution((1, 4, 5, 5), 6, window(3, 3))
    arguments = _named(case)
    convolution_w8a16(**arguments)

    with pytest.raises(RuntimeError, match=message):
        convolution_w8a16(**{**arguments, **change})


def test_refuses_groups_across_taps(library: KernelLibrary) -> None:
    del library
    case = weight_only_convolution((1, 8, 5, 5), 6, window(2, 1))

    with pytest.raises(RuntimeError, match="groups, and weights with offsets"):
        convolution_w8a16(**{**_named(case), "w_scale": torch.ones(1, 0, 64)})
    wide = weight_only_convolution((1, 24, 5, 5), 6, window(2, 1))
    with pytest.raises(RuntimeError, match="groups of 16 weights do not divide the 24 channels"):
        convolution_w8a16(**{**_named(wide), "w_scale": torch.ones(1, 3, 64)})


def _named(case: WeightOnlyConvolution) -> dict[str, Any]:
    (x, packed, _), options = case.arguments()
    return {"x": x, "w_packed": packed, "w_scale": case.scale[:, 0], **options}
