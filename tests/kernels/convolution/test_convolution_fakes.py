"""What torch believes about the convolutions while it traces is what they do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.cases.convolution_kernel import (
    GEOMETRIES,
    WINDOW,
    Convolution,
    convolution,
    depthwise,
    window,
)
from tests.support.cases.fake_kernels import OPCHECKS, to_meta
from tests.support.cases.linear_kernel import REAL, STORED

from qfuse.ir.errors import InputError
from qfuse.kernels import KernelLibrary, convolution_w8a8

EPILOGUE = "act(gelu)|add(0,1.0)|cast(float32)"


def arguments(case: Convolution, **options: Any) -> list[Any]:
    """Every argument of ``qfuse::convolution_w8a8``, by position."""
    (x, *rest), named = case.with_options(epilogue=EPILOGUE, **options).arguments()
    extra = torch.randn(1, 1, dtype=torch.bfloat16)
    real = named.get("product_dtype", torch.float32)
    given = [named[name] for name in WINDOW if name in named]
    return [
        x, *rest, named["w_zero_point"], named["bias"], *given,
        [extra], EPILOGUE, real, torch.float32,
    ]  # fmt: skip


def output(dtype: torch.dtype) -> list[Any]:
    """What ``qfuse::convolution_w8a8_quantized`` takes instead of the last argument."""
    low = torch.iinfo(dtype).min
    return [torch.tensor([0.1]), torch.tensor([1]), low, low + 255, True, False, dtype]


@pytest.mark.parametrize(
    ("index", "last"),
    [
        *((0, False), (2, True), (3, False), (4, True), (7, False)),
        *(
            pytest.param(index, last, marks=pytest.mark.thorough)
            for index, last in ((0, True), (2, False), (3, True), (4, False), (7, True))
        ),
    ],
)
def test_opcheck(library: KernelLibrary, index: int, *, last: bool) -> None:
    del library
    shape, w = GEOMETRIES[index]
    args = arguments(convolution(shape, 10, w, last=last, weight_zero_point=True))
    stored = (*args[:-1], *output(torch.int8))
    ops = torch.ops.qfuse

    torch.library.opcheck(ops.convolution_w8a8.default, tuple(args), test_utils=OPCHECKS)
    torch.library.opcheck(ops.convolution_w8a8_quantized.default, stored, test_utils=OPCHECKS)
    if not w.transposed:
        args = arguments(depthwise(shape, w, last=last, multiple=2, weight_zero_point=True))
        stored = (*args[:-1], *output(torch.uint8))
        op, quantized = ops.convolution_depthwise_w8a8, ops.convolution_depthwise_w8a8_quantized
        torch.library.opcheck(op.default, tuple(args), test_utils=OPCHECKS)
        torch.library.opcheck(quantized.default, stored, test_utils=OPCHECKS)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_fake_results_are_like_real_ones(
    library: KernelLibrary, geometry: tuple[tuple[int, ...], Any], *, last: bool
) -> None:
    del library
    case = convolution(geometry[0], 10, geometry[1], last=last)
    calls = [
        (torch.ops.qfuse.convolution_w8a8.default, arguments(case, product_dtype=real))
        for real in REAL
    ]
    calls += [
        (
            torch.ops.qfuse.convolution_w8a8_quantized.default,
            [*arguments(case)[:-1], *output(dtype)],
        )
        for dtype in STORED
    ]
    for op, args in calls:
        result, meta = op(*args), op(*to_meta(args))

        assert meta.device.type == "meta"
        assert (meta.shape, meta.dtype) == (result.shape, result.dtype)
        assert meta.stride() == result.stride()


def test_sizes_may_be_symbolic(library: KernelLibrary) -> None:
    del library
    case = convolution((2, 6, 9, 8), 10, window(3, 3, stride=2, padding=1))

    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            (_, *rest), named = case.arguments()
            return convolution_w8a8(x, *rest, **named)

    images, size = torch.export.Dim("images", min=1, max=64), torch.export.Dim("size", min=3)
    program = torch.export.export(
        Module(), (case.x,), dynamic_shapes={"x": {0: images, 2: size}}, strict=False
    )

    for count, height in ((1, 9), (3, 5), (2, 30)):
        x = torch.ones(count, 6, height, 8, dtype=torch.int8).contiguous(
            memory_format=torch.channels_last
        )
        assert torch.equal(program.module()(x), Module()(x))


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (0, torch.ones(2, 6, 9, 8), "x must be int8 or uint8"),
        (0, torch.ones(6, 9, dtype=torch.int8), "x must have 3 or 4 axes"),
        (0, torch.ones(2, 7, 9, 8, dtype=torch.int8), "does not fit"),
        (3, torch.ones(1, 1, 14, 64, 4), "does not fit"),
        (4, torch.zeros(129, dtype=torch.int32), "does not fit"),
        (11, [9, 1], "larger than the padded input"),
        (9, [1], "stride must have 2 numbers"),
        (9, [0, 1], "stride must be positive"),
        (10, [-1, 1], "padding must not be negative"),
        (14, 0, "groups must be positive"),
        (14, 4, "cannot be split into 4 groups"),
        (17, torch.float64, "product_dtype must be one of"),
        (18, torch.int8, "the result must be one of"),
    ],
)
def test_fakes_refuse_what_cannot_be(
    library: KernelLibrary, index: int, value: Any, message: str
) -> None:
    del library
    args = arguments(convolution((2, 6, 9, 8), 10, window(3, 3)))
    args[index] = value

    with pytest.raises(InputError, match=message):
        torch.ops.qfuse.convolution_w8a8.default(*to_meta(args))
    with pytest.raises(RuntimeError):
        torch.ops.qfuse.convolution_w8a8.default(*args)


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (0, torch.ones(2, 6, 9, 8), "x must be int8 or uint8"),
        (0, torch.ones(6, 9, dtype=torch.int8), "x must have 3 or 4 axes"),
        (0, torch.ones(2, 7, 9, 8, dtype=torch.int8), "n=6 is not a multiple of 7"),
        (3, torch.ones(1, 2, 64, 4, dtype=torch.int8), "does not fit"),
        (9, [1], "stride must have 2 numbers"),
        (14, torch.float64, "product_dtype must be one of"),
        (15, torch.int8, "the result must be one of"),
    ],
)
def test_fakes_refuse_what_cannot_be_depthwise(
    library: KernelLibrary, index: int, value: Any, message: str
) -> None:
    del library
    args = arguments(depthwise((2, 6, 9, 8), window(3, 3)))
    args[index] = value

    with pytest.raises(InputError, match=message):
        torch.ops.qfuse.convolution_depthwise_w8a8.default(*to_meta(args))
    with pytest.raises(RuntimeError):
        torch.ops.qfuse.convolution_depthwise_w8a8.default(*args)
