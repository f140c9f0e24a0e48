"""The meaning of quantize and dequantize, against loops over single numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from tests.support.strategies.quant_specs import FLOATS, SEEDS, arithmetics, blocks, shapes

from qfuse.ir.quant.reference import dequantize, expand_blocks, quantize, reduce_blocks
from qfuse.ir.quant.spec import Arithmetic, Block, QuantSpec, ZeroPointDomain

pytestmark = [pytest.mark.property, pytest.mark.numeric]

_RANGES = {
    torch.int8: [(-128, 127), (-127, 127), (-8, 7), (0, 0)],
    torch.uint8: [(0, 255), (0, 15), (3, 200)],
    # A narrow float cannot tell the ends of the whole range of int16 from what lies beyond.
    torch.int16: [(-256, 255), (-1, 1)],
    torch.float8_e4m3fn: [(-448, 448), (-16, 16)],
    torch.float8_e5m2: [(-57344, 57344)],
}


def rounded(value: float, dtype: torch.dtype) -> float:
    """Round one number to a float type, as a processor that computes in float32 or wider does."""
    if dtype is torch.float64:
        return value
    single = torch.tensor(value, dtype=torch.float64).to(torch.float32)
    return float(single.to(dtype))


def float_code(value: float, dtype: torch.dtype) -> float:
    """The quantized value nearest to a value; of two equally near ones that with an even code."""
    codes = torch.arange(256, dtype=torch.uint8)
    stored = [(float(v), int(c)) for v, c in zip(codes.view(dtype).float(), codes, strict=True)]
    finite = [(v, c) for v, c in stored if math.isfinite(v)]
    return min(finite, key=lambda pair: (abs(pair[0] - value), pair[1] % 2))[0]


def one_code(x: float, scale: float, zero: float | None, spec: QuantSpec, of: torch.dtype) -> float:
    """Quantize one number by the formula of the spec; ``of`` is the scale's own type."""
    math_, compute = spec.arithmetic, spec.arithmetic.compute
    x = rounded(x, compute)
    if spec.domain is ZeroPointDomain.FLOAT_OFFSET:
        middle = (spec.quant_max + spec.quant_min + 1) / 2
        below = rounded((zero or 0.0) - rounded(scale * middle, of), of)
        step = rounded(
            rounded(x - rounded(below, compute), compute) / rounded(scale, compute), compute
        )
        return max(spec.quant_min, min(spec.quant_max, rounded(whole(step), compute)))
    if math_.reciprocal:
        y = rounded(x * rounded(rounded(1 / scale, of), compute), compute)
    else:
        y = rounded(x / rounded(scale, compute), compute)
    if spec.dtype.is_floating_point:
        # torch rounds a double to float32 on its way to eight bits.
        y = rounded(max(spec.quant_min, min(spec.quant_max, y)), torch.float32)
        return float_code(y, spec.dtype)
    z = rounded(zero or 0.0, compute)
    code = (
        whole(rounded(y + z, compute)) if math_.zero_point_first else rounded(whole(y) + z, compute)
    )
    return max(spec.quant_min, min(spec.quant_max, code))


def whole(value: float) -> float:
    """Round half to even; an infinity, which a narrow type makes of a large number, stays one."""
    return round(value) if math.isfinite(value) else value


def one_number(q: float, scale: float, zero: float | None, spec: QuantSpec) -> float:
    """Dequantize one number by the formula of the spec."""
    compute = spec.arithmetic.compute
    q, scale = rounded(q, compute), rounded(scale, compute)
    if spec.domain is ZeroPointDomain.FLOAT_OFFSET and zero is not None:
        middle = (spec.quant_max + spec.quant_min + 1) / 2
        product = rounded(rounded(q - middle, compute) * scale, compute)
        return rounded(rounded(product + rounded(zero, compute), compute), spec.float_dtype)
    z = rounded(zero or 0.0, compute)
    return rounded(rounded(rounded(q - z, compute) * scale, compute), spec.float_dtype)


def elements(shape: tuple[int, ...], block: Block) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every index of a tensor, with the index of its block."""
    for index in itertools.product(*map(range, shape)):
        yield index, tuple(0 if b is None else i // b for i, b in zip(index, block, strict=True))


@st.composite
def specs(draw: st.DrawFn, rank: int, *, whole: bool = False) -> QuantSpec:
    """Specs whose range every compute type can tell from its surroundings; ``whole``: integers."""
    dtypes = [dtype for dtype in _RANGES if not (whole and dtype.is_floating_point)]
    dtype = draw(st.sampled_from(dtypes))
    low, high = draw(st.sampled_from(_RANGES[dtype]))
    domain = ZeroPointDomain.NONE
    if not dtype.is_floating_point:
        domain = draw(st.sampled_from(ZeroPointDomain))
    real = draw(st.sampled_from(FLOATS))
    return QuantSpec(dtype, low, high, draw(blocks(rank)), real, draw(arithmetics()), domain)


@st.composite
def cases(
    draw: st.DrawFn, *, wide: bool = False, fine: bool = False
) -> tuple[tuple[int, ...], QuantSpec, torch.Tensor, torch.Tensor | None]:
    """A shape, a spec, and scale and zero point for them.

    ``wide`` computes in float32 alone, with no reciprocal of a bfloat16 scale; ``fine`` quantizes
    float32 to integers in float32 or float64. Neither filters: most specs would be, and hypothesis calls that a fault of the test.
    """
    torch.manual_seed(draw(SEEDS))
    shape = draw(shapes(most=3))
    spec = draw(specs(len(shape), whole=fine))
    if fine:
        compute = draw(st.sampled_from((torch.float32, torch.float64)))
        arithmetic = replace(spec.arithmetic, compute=compute)
        spec = replace(spec, float_dtype=torch.float32, arithmetic=arithmetic)
    if wide:
        domain = spec.domain
        domain = ZeroPointDomain.INT if domain is ZeroPointDomain.FLOAT_OFFSET else domain
        arithmetic = replace(spec.arithmetic, compute=torch.float32)
        spec = replace(spec, float_dtype=torch.float32, arithmetic=arithmetic, domain=domain)
    grid = [int(n) for n in spec.grid(shape)]
    rough = () if wide and spec.arithmetic.reciprocal else (torch.bfloat16,)
    of = draw(st.sampled_from((torch.float32, torch.float64, *rough)))
    scale = (torch.rand(grid) * 0.2 + 0.01).to(of)
    if draw(st.booleans()):
        scale = torch.full(grid, draw(st.sampled_from([0.125, 0.5, 0.0123, 1 / 3])), dtype=of)
    zero = None
    if spec.domain is ZeroPointDomain.INT:
        kind = draw(st.sampled_from((torch.int32, torch.int64, torch.float32)))
        zero = torch.randint(spec.quant_min, spec.quant_max + 1, grid).to(kind)
    if spec.domain is ZeroPointDomain.FLOAT_OFFSET:
        zero = torch.randn(grid, dtype=of)
    return shape, spec, scale, zero


def hard_numbers(shape: tuple[int, ...], spec: QuantSpec, scale: torch.Tensor) -> torch.Tensor:
    """Real numbers on and between the steps of the grid, on ties, and far outside of the range."""
    step = expand_blocks(scale.double(), spec.block, shape)
    whole = torch.randint(-300, 301, shape) / torch.randint(1, 3, shape)
    x = torch.where(torch.rand(shape) < 0.5, whole * step, torch.randn(shape).double())
    x = torch.where(torch.rand(shape) < 0.1, x * 1e4, x)
    return x.to(spec.float_dtype)


@given(cases())
def test_quantize_is_the_formula_element_by_element(
    case: tuple[tuple[int, ...], QuantSpec, torch.Tensor, torch.Tensor | None],
) -> None:
    shape, spec, scale, zero = case
    x = hard_numbers(shape, spec, scale)
    q = quantize(x, scale, zero, spec)

    assert (q.dtype, tuple(q.shape)) == (spec.dtype, shape)
    for at, block in elements(shape, spec.block):
        z = None if zero is None else float(zero[block])
        want = one_code(float(x[at]), float(scale[block]), z, spec, scale.dtype)
        assert float(q[at]) == want, f"x={float(x[at])!r} at {at}"


def test_a_double_becomes_eight_bits_by_way_of_float32() -> None:
    arithmetic = Arithmetic(torch.float64, reciprocal=False, zero_point_first=False)
    spec = QuantSpec(
        torch.float8_e4m3fn, -448, 448, (), torch.float32, arithmetic, ZeroPointDomain.NONE
    )
    # The quotient is a little more than 116, which is between 112 and 120 and rounds to even.
    scale, x = torch.tensor(0.12), torch.tensor(13.92)
    assert 116 < float(x) / float(scale) < 116 + 1e-5
    want = one_code(float(x), float(scale), None, spec, scale.dtype)
    assert float(quantize(x, scale, None, spec)) == want == 112


@given(cases())
def test_dequantize_is_the_formula_element_by_element(
    case: tuple[tuple[int, ...], QuantSpec, torch.Tensor, torch.Tensor | None],
) -> None:
    shape, spec, scale, zero = case
    q = torch.randint(spec.quant_min, spec.quant_max + 1, shape).to(spec.dtype)
    x = dequantize(q, scale, zero, spec)

    assert (x.dtype, tuple(x.shape)) == (spec.float_dtype, shape)
    for at, block in elements(shape, spec.block):
        z = None if zero is None else float(zero[block])
        want = one_number(float(q[at]), float(scale[block]), z, spec)
        assert float(x[at]) == want, f"q={float(q[at])!r} at {at}"


@given(cases(wide=True))
def test_quantizing_again_gives_the_same_codes(
    case: tuple[tuple[int, ...], QuantSpec, torch.Tensor, torch.Tensor | None],
) -> None:
    shape, spec, scale, zero = case
    q = torch.randint(spec.quant_min, spec.quant_max + 1, shape).to(spec.dtype)
    again = quantize(dequantize(q, scale, zero, spec), scale, zero, spec)
    assert torch.equal(again.float(), q.float())


def test_the_reciprocal_of_a_bfloat16_scale_may_move_quantized_values() -> None:
    spec = QuantSpec(torch.int8, -128, 127, (), torch.float32, Arithmetic(), ZeroPointDomain.INT)
    scale, zero = torch.tensor(0.0277).bfloat16(), torch.tensor(123)
    q = torch.tensor(-119, dtype=torch.int8)

    assert quantize(dequantize(q, scale, zero, spec), scale, zero, spec).item() == -118
    wide = scale.float()
    assert quantize(dequantize(q, wide, zero, spec), wide, zero, spec).item() == -119


# Its least value, about -20.4, is rounded to bfloat16.
OFFSET = QuantSpec(
    torch.uint8,
    0,
    255,
    (),
    torch.float32,
    Arithmetic(torch.float32, reciprocal=False, zero_point_first=False),
    ZeroPointDomain.FLOAT_OFFSET,
)


@given(cases(fine=True))
@example(((), OFFSET, torch.tensor(0.1611).bfloat16(), torch.tensor(0.1992).bfloat16()))
def test_what_is_in_range_moves_by_half_a_step_at_most(
    case: tuple[tuple[int, ...], QuantSpec, torch.Tensor, torch.Tensor | None],
) -> None:
    shape, spec, scale, zero = case
    step = expand_blocks(scale.double(), spec.block, shape).expand(shape)
    codes = torch.rand(shape, dtype=torch.float64) * (spec.quant_max - spec.quant_min)
    codes += spec.quant_min
    x = dequantize(codes, scale.double(), zero, spec).double()
    assert x.dtype is torch.float64
    moved = dequantize(quantize(x.float(), scale, zero, spec), scale, zero, spec).double() - x
    # Rounding x, the product, and, in the scale's own type, the reciprocal and the least value of a
    # float offset: a few units in the last place of the operands.
    size = x.abs() + step * max(abs(spec.quant_min), spec.quant_max)
    in_scale_dtype = spec.arithmetic.reciprocal or spec.domain is ZeroPointDomain.FLOAT_OFFSET
    coarsest = scale.dtype if in_scale_dtype else torch.float32
    slack = 8 * max(torch.finfo(d).eps for d in (coarsest, torch.float32)) * size
    assert bool((moved.abs() <= step / 2 + slack).all())


@given(SEEDS, st.data(), shapes(least=1, most=3))
def test_reduce_blocks_finds_the_ends_of_every_block(
    seed: int, data: st.DataObject, shape: tuple[int, ...]
) -> None:
    assume(all(shape))
    torch.manual_seed(seed)
    block = data.draw(blocks(len(shape)))
    x = torch.randn(shape)
    least, greatest = reduce_blocks(x, block)
    members: dict[tuple[int, ...], list[float]] = {}
    for at, owner in elements(shape, block):
        members.setdefault(owner, []).append(float(x[at]))
    assert {at: float(least[at]) for at in members} == {k: min(v) for k, v in members.items()}
    assert {at: float(greatest[at]) for at in members} == {k: max(v) for k, v in members.items()}
    assert least.numel() == greatest.numel() == len(members)
