"""Norms and activations that give codes: codes by bits, norms within the reference's own noise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.cases.linear_kernel import REAL, STORED
from tests.support.cases.rowwise_kernel import assert_dynamic, dynamic, rows, specs

from qfuse.ir.ops.epilogue import Epilogue
from qfuse.ir.quant.choose import Formula
from qfuse.ir.quant.reference import dequantize, quantize
from qfuse.ir.quant.spec import QuantSpec
from qfuse.kernels import KernelLibrary, instruction_set
from qfuse.kernels.rowwise import (
    RowwiseOutput,
    activation_quantized,
    layer_norm_quantized,
    rms_norm_quantized,
)
from qfuse.lower.operands.rowwise_conditions import ROWWISE_FORMULAS

pytestmark = pytest.mark.numeric

WIDTHS = (1, 3, 15, 16, 17, 63, 64, 65, 130, 1000)


def arithmetics(real: torch.dtype) -> Iterator[dict[str, Any]]:
    """Every order of operations that a source may have."""
    for scale in (torch.float32, torch.float64, torch.bfloat16):
        for compute in {torch.float32, real}:
            for reciprocal in (True, False):
                for first in (True, False):
                    yield {
                        "scale_dtype": scale,
                        "compute": compute,
                        "reciprocal": reciprocal,
                        "zero_point_first": first,
                    }


@pytest.mark.parametrize(
    ("formula", "span"),
    [
        (formula, span)
        for formula in ROWWISE_FORMULAS
        for span in [(-128, 127), (-127, 127), (0, 255), (0, 127)]
        # It divides by the least code.
        if formula is not Formula.AO_SYMMETRIC_NO_CLIPPING or span[0]
    ],
)
@pytest.mark.parametrize("real", REAL)
def test_rows_choose_and_encode_by_bits(
    isa: str, formula: Formula, real: torch.dtype, span: tuple[int, int]
) -> None:
    del isa
    low, high = span
    dtype = torch.int8 if low < 0 else torch.uint8
    x = rows((9, 37), real)
    for arithmetic in arithmetics(real):
        output = dynamic(
            formula=str(formula), quant_min=low, quant_max=high, dtype=dtype, **arithmetic
        )
        assert_dynamic(x, output, activation_quantized(x, "", output))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("zero", [torch.int8, torch.int32, torch.int64, torch.float32])
def test_widths_and_types_of_zero_points(isa: str, width: int, zero: torch.dtype) -> None:
    del isa
    x = rows((5, width), torch.float32)
    output = dynamic(formula="ao-asymmetric", zero_point_dtype=zero, keep=True)
    got = activation_quantized(x, "", output)
    assert_dynamic(x, output, got)
    assert torch.equal(got[3], x)


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("scale", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("reciprocal", [True, False])
def test_a_given_scale_encodes_by_bits(
    isa: str, dtype: torch.dtype, scale: torch.dtype, *, reciprocal: bool
) -> None:
    del isa
    info = torch.iinfo(dtype)
    factor = torch.tensor(0.0123, dtype=scale)
    # Half steps of the scale, which round to even or away depending on the last bit of 1 / scale.
    x = torch.cat([torch.arange(-300, 300) * 0.5 * 0.0123, torch.randn(41)]).reshape(1, -1)
    for first in (True, False):
        for zero in (None, 0, info.min + 3):
            given = None if zero is None else torch.tensor(zero, dtype=torch.int32)
            output = RowwiseOutput(
                quant_min=info.min,
                quant_max=info.max - 5,
                dtype=dtype,
                scale=factor,
                zero_point=given,
                reciprocal=reciprocal,
                zero_point_first=first,
            )
            _, spec = specs(output, x)
            spec = replace(spec, block=(None, None))
            grid = None if given is None else given.reshape(1, 1)
            want = quantize(x, factor.reshape(1, 1), grid, spec)
            codes, chosen, points, *_ = activation_quantized(x, "", output)
            assert torch.equal(codes, want)
            assert (chosen.numel(), points.numel()) == (0, 0)


@pytest.mark.parametrize("real", REAL)
@pytest.mark.parametrize(
    "steps", ["act(silu)|mul(0)", "mul(0)|act(relu)", "cast(bfloat16)|act(tanh)"]
)
def test_steps_come_before_codes(isa: str, real: torch.dtype, steps: str) -> None:
    """The float result is that of the steps; the codes are exactly those of it."""
    del isa
    x, gate = torch.randn(6, 5, 90).to(real), torch.randn(6, 5, 90).to(real)
    want = Epilogue.parse(steps).apply(x, [gate])
    output = dynamic(keep=True)
    got = activation_quantized(x, steps, output, [gate], float_dtype=want.dtype)

    assert_dynamic(got[3], output, got)
    step = torch.finfo(want.dtype).eps
    torch.testing.assert_close(got[3], want, atol=4 * step, rtol=4 * step)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, inner: torch.dtype, real: torch.dtype
) -> torch.Tensor:
    """The norm as Llama spells it, rounded where the kernel is told to."""
    h = x.to(weight.dtype) if weight is not None and weight.dtype is torch.float64 else x.float()
    h = (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(inner)
    return (h if weight is None else weight * h).to(real)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("real", REAL)
@pytest.mark.parametrize("inner_is_real", [True, False])
def test_rms_norm(isa: str, width: int, real: torch.dtype, *, inner_is_real: bool) -> None:
    del isa
    inner = real if inner_is_real else torch.float32
    x, weight = torch.randn(3, 4, width).to(real) * 3, torch.randn(width).to(real)
    output = dynamic(keep=True)
    got = rms_norm_quantized(x, weight, 1e-6, output, inner=inner)

    assert_dynamic(got[3], output, got)
    want = rms_norm(x, weight, inner, real)
    # A last bit of the root moves what stands at a tie by one step, before the weight and after.
    step = torch.finfo(real).eps
    torch.testing.assert_close(got[3], want, atol=1e-6, rtol=3 * step)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("real", REAL)
def test_layer_norm(isa: str, width: int, real: torch.dtype) -> None:
    del isa
    x = torch.randn(3, 4, width).to(real) * 3 + 5
    weight, bias = torch.randn(width).to(real), torch.randn(width).to(real)
    output = dynamic(keep=True)
    got = layer_norm_quantized(x, weight, bias, 1e-5, output)

    assert_dynamic(got[3], output, got)
    exact = F.layer_norm(x.double(), (width,), weight.double(), bias.double(), 1e-5)
    # The mean, the difference and the factor round in float32 at the size of the row's elements,
    # which the deviation and the weight scale; the result rounds once in its own type.
    deviation = (x.double().var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    size = x.double().abs().amax(-1, keepdim=True) / deviation * weight.double().abs()
    allowed = 4 * torch.finfo(torch.float32).eps * size + torch.finfo(real).eps * exact.abs()
    assert ((got[3].double() - exact).abs() <= allowed + 1e-30).all()


@pytest.mark.parametrize("far", [10.0, 1e3, 1e5])
def test_layer_norm_of_rows_far_from_zero(isa: str, far: float) -> None:
    """What the mean rounds away is no small part of a row that hardly varies."""
    del isa
    x = torch.randn(50, 768) * 0.01 + far
    got = layer_norm_quantized(x, None, None, 1e-5, dynamic(keep=True))[3]
    exact = F.layer_norm(x.double(), (768,), eps=1e-5)
    mine, theirs = ((y.double() - exact).abs().max() for y in (got, F.layer_norm(x, (768,))))
    assert mine <= theirs + 1e-5


@pytest.mark.parametrize("columns", [96, 384, 768, 1000])
@pytest.mark.parametrize("value", [0.0, 3.3, -1e4, 1e9, 1e33, 3e38])
def test_a_constant_row_is_normalized_to_its_bias(isa: str, columns: int, value: float) -> None:
    """However its mean is rounded, unless its sum overflows."""
    del isa
    bias = torch.randn(columns)
    x = torch.full((3, columns), value if value < 1e38 else value / columns)
    got = layer_norm_quantized(x, None, bias, 1e-5, dynamic(keep=True))[3]

    torch.testing.assert_close(got, bias.expand(3, -1), rtol=0, atol=1e-6)


def test_a_long_row_that_hardly_varies(isa: str) -> None:
    del isa
    steps = torch.randint(-4, 5, (2, 2**16)).double()
    x = 1000.3 + steps * 2.0**-14
    got = layer_norm_quantized(x.float(), None, None, 1e-12, dynamic(keep=True))[3]
    exact = F.layer_norm(x.float().double(), (2**16,), eps=1e-12)

    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "kinds", [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16),
              (torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16)],
)  # fmt: skip
def test_the_residual_is_added_before_and_kept(
    isa: str, kinds: tuple[torch.dtype, torch.dtype]
) -> None:
    del isa
    x, residual = torch.randn(7, 70).to(kinds[0]), torch.randn(7, 70).to(kinds[1])
    weight = torch.randn(70)
    total = x + residual
    real = total.dtype
    output = dynamic(keep=True, keep_sum=True)
    got = rms_norm_quantized(
        x, weight, 1e-6, output, residual=residual, inner=real, float_dtype=real
    )
    alone = rms_norm_quantized(
        total, weight, 1e-6, dynamic(keep=True), inner=real, float_dtype=real
    )

    assert torch.equal(got[4], total)
    assert got[4].dtype is total.dtype
    for mine, want in zip(got[:4], alone[:4], strict=True):
        assert torch.equal(mine, want)


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("real", REAL)
@pytest.mark.parametrize("width", [1, 15, 17, 64, 130])
@pytest.mark.parametrize("each", [False, True])
def test_stored_rows_are_dequantized_while_they_are_read(
    isa: str, stored: torch.dtype, real: torch.dtype, width: int, *, each: bool
) -> None:
    """The bits of a dequantize before the kernel, for input and residual, per tensor and per row."""
    del isa
    info = torch.iinfo(stored)
    q = torch.randint(info.min, info.max + 1, (3, 4, width + 2), dtype=stored)[..., :width]
    block = (1, 1, None) if each else (None, None, None)
    spec = QuantSpec(stored, info.min, info.max, block, real)
    grid = (3, 4, 1) if each else (1, 1, 1)
    scale = torch.rand(grid, dtype=torch.float64) * 0.05 + 1e-3
    zero = torch.randint(info.min, info.max + 1, grid, dtype=torch.int32)
    x, other, weight = (
        dequantize(q, scale, zero, spec),
        torch.randn(3, 4, width),
        torch.randn(width),
    )
    output = dynamic(keep=True, keep_sum=True)
    given = {"x_scale": scale, "x_zero_point": zero, "x_dtype": real}
    more = {"residual": q, "residual_scale": scale, "residual_dtype": real}
    unshifted = dequantize(q, scale, None, spec)
    rms, layer = rms_norm_quantized, layer_norm_quantized
    pairs = [
        (rms(q, weight, 1e-6, output, residual=other, **given),
         rms(x, weight, 1e-6, output, residual=other)),
        (rms(other, weight, 1e-6, output, **more),
         rms(other, weight, 1e-6, output, residual=unshifted)),
        (layer(q, weight, None, 1e-6, output, **given, **more),
         layer(x, weight, None, 1e-6, output, residual=unshifted)),
        (activation_quantized(q, "act(silu)", dynamic(keep=True), **given),
         activation_quantized(x, "act(silu)", dynamic(keep=True))),
    ]  # fmt: skip
    for got, want in pairs:
        assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_refuses_sources_that_do_not_fit(library: KernelLibrary) -> None:
    del library
    q, x, scale = torch.zeros(2, 8, dtype=torch.int8), torch.randn(2, 8), torch.ones(1)
    f32 = torch.float32
    with pytest.raises(RuntimeError, match="8-bit values need a scale"):
        activation_quantized(q, "", dynamic(), x_dtype=f32, float_dtype=f32)
    with pytest.raises(RuntimeError, match="floats have neither scale nor zero point"):
        activation_quantized(x, "", dynamic(), x_scale=scale)
    with pytest.raises(RuntimeError, match="x has 3 elements, expected 1 or 2"):
        activation_quantized(q, "", dynamic(), x_scale=torch.ones(3), x_dtype=f32)
    with pytest.raises(RuntimeError, match="x is Float, not BFloat16"):
        activation_quantized(x, "", dynamic(), x_dtype=torch.bfloat16)


def test_instruction_sets_give_the_same_bits(library: KernelLibrary) -> None:
    x, weight = torch.randn(5, 333).bfloat16(), torch.randn(333)
    output = dynamic(keep=True)

    def run() -> list[tuple[torch.Tensor, ...]]:
        return [
            rms_norm_quantized(x, weight, 1e-6, output, inner=torch.bfloat16),
            layer_norm_quantized(x, weight, weight, 1e-5, output),
            activation_quantized(x, "act(silu)|mul(0)", output, [x]),
        ]

    want = run()
    for name in library.instruction_sets:
        with instruction_set(name):
            for mine, theirs in zip(run(), want, strict=True):
                assert all(map(torch.equal, mine, theirs)), name


def test_threads_do_not_change_a_bit(library: KernelLibrary) -> None:
    del library
    x = torch.randn(301, 1000)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(rms_norm_quantized(x, None, 1e-6, dynamic()))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))
