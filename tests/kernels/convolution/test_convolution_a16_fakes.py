"""What torch believes about weight-only convolutions while it traces is what they do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.cases.convolution_kernel import GEOMETRIES, WINDOW, Window, window
from tests.support.cases.fake_kernels import OPCHECKS, to_meta
from tests.support.cases.linear_kernel import REAL
from tests.support.cases.weight_only_convolution import (
    WeightOnlyConvolution,
    weight_only_convolution,
)

from qfuse.ir.errors import InputError
from qfuse.kernels import KernelLibrary, convolution_w8a16

DEPTHWISE = ((2, 6, 9, 8), window(3, 3, padding=1, groups=6))


def arguments(case: WeightOnlyConvolution) -> list[Any]:
    """Every argument of the op, by position."""
    args, named = case.arguments()
    extra = torch.randn(1, 1)
    return [
        *args, named["w_zero_point"], named["out_channels"], named["bias"],
        *(named[name] for name in WINDOW), [extra], "act(gelu)|add(0,1.0)", case.compute,
        torch.float32,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("geometry", "last"),
    [
        (GEOMETRIES[0], False),
        (GEOMETRIES[2], True),
        (GEOMETRIES[3], False),
        (GEOMETRIES[7], True),
        (DEPTHWISE, True),
        *(
            pytest.param(geometry, last, marks=pytest.mark.thorough)
            for geometry, last in (
                (GEOMETRIES[0], True),
                (GEOMETRIES[2], False),
                (GEOMETRIES[3], True),
                (GEOMETRIES[7], False),
                (DEPTHWISE, False),
            )
        ),
    ],
)
def test_opcheck(
    library: KernelLibrary, geometry: tuple[tuple[int, ...], Window], *, last: bool
) -> None:
    del library
    shape, w = geometry
    ops = torch.ops.qfuse
    for bits, op in ((4, ops.convolution_w4a16), (8, ops.convolution_w8a16)):
        case = weight_only_convolution(shape, 12, w, bits=bits, last=last, zero_point=True)
        torch.library.opcheck(op.default, tuple(arguments(case)), test_utils=OPCHECKS)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("geometry", [*GEOMETRIES, DEPTHWISE], ids=str)
def test_fake_results_are_like_real_ones(
    library: KernelLibrary, geometry: tuple[tuple[int, ...], Any], *, last: bool
) -> None:
    del library
    ops = torch.ops.qfuse
    for bits, op in ((4, ops.convolution_w4a16), (8, ops.convolution_w8a16)):
        for dtype in REAL:
            shape, w = geometry
            case = weight_only_convolution(shape, 12, w, bits=bits, dtype=dtype, last=last)
            args = arguments(case)
            result, meta = op.default(*args), op.default(*to_meta(args))

            assert (meta.shape, meta.dtype) == (result.shape, result.dtype)
            assert meta.stride() == result.stride()


def test_sizes_may_be_symbolic(library: KernelLibrary) -> None:
    del library
    case = weight_only_convolution((2, 6, 9, 8), 10, window(3, 3, stride=2, padding=1))

    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            (_, *rest), named = case.arguments()
            return convolution_w8a16(x, *rest, **named)

    images, size = torch.export.Dim("images", min=1, max=64), torch.export.Dim("size", min=3)
    program = torch.export.export(
        Module(), (case.x,), dynamic_shapes={"x": {0: images, 2: size}}, strict=False
    )

    for count, height in ((1, 9), (3, 5), (2, 30)):
        x = torch.randn(count, 6, height, 8).contiguous(memory_format=torch.channels_last)
        assert torch.equal(program.module()(x), Module()(x))


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (0, torch.ones(2, 6, 9, 8, dtype=torch.int8), "must be floats"),
        (0, torch.ones(6, 9), "x must have 3 or 4 axes"),
        (0, torch.ones(2, 7, 9, 8), "does not fit"),
        (1, torch.ones(1, 14, 64, 4), "does not fit"),
        (2, torch.ones(1, 7, 64), "groups must be of a multiple of 8 input channels"),
        (2, torch.ones(1, 1, 60), "w_scale"),
        (3, torch.ones(1, 1, 64), "w_zero_point must be"),
        (4, 70, "does not fit"),
        (5, torch.ones(9), "bias has 9 elements"),
        (7, [1], "stride must have 2 numbers"),
        (12, 4, "cannot be split into 4 groups"),
        (16, torch.float64, "must be floats"),
    ],
)
def test_fakes_refuse_what_cannot_be(
    library: KernelLibrary, index: int, value: Any, message: str
) -> None:
    del library
    args = arguments(weight_only_convolution((2, 6, 9, 8), 10, window(3, 3)))
    args[index] = value

    with pytest.raises(InputError, match=message):
        torch.ops.qfuse.convolution_w8a16.default(*to_meta(args))
    with pytest.raises(RuntimeError):
        torch.ops.qfuse.convolution_w8a16.default(*args)
