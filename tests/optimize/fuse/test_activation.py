from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.cases.gated import (
    ACTS,
    activated,
    epilogues,
    fused,
    refused,
    stored,
    times,
    two_levels,
)
from tests.support.cases.mx_linear import E4M3, mx, nv
from tests.support.cases.propagate import Graph, spec_of
from tests.support.sources.dialects import equal_but_for_nan

from qfuse.ir.events import MissCode
from qfuse.ir.graph.text import to_text
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.activation import as_activation
from qfuse.ir.ops.qdq import as_quantize
from qfuse.ir.ops.views import shape_of
from qfuse.ir.quant.choose import ChooseSpec, Formula
from qfuse.ir.quant.element import CONTAINER, Element, ScaleFormat
from qfuse.optimize.fuse.quantized_output import quantized_result
from qfuse.optimize.schedule import optimize
from qfuse.rewrite.clone import clone
from qfuse.rewrite.rule import Miss
from qfuse.testing.quant import QuantizedLinear, per_tensor
from qfuse.testing.run import random_inputs, run

aten = torch.ops.aten


@pytest.mark.numeric
def test_golden_halves_of_one_tensor_are_quantized_per_token() -> None:
    g = Graph("m", 16)
    split = g.call(aten.split.Tensor, g.x, 8, -1)
    gate, up = (g.b.item(split, index) for index in range(2))
    program = g.done(stored(g, times(g, activated(g, gate), up), "token"))

    assert fused(program, m=3).fired == {"fuse-activation-quantize": 1}
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[s0, 16]
%0 = qfuse.activation(%x, None, None, '', 'glu(silu,gate-first)', (), None, None, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int', 'ao-asymmetric int8[-128,127] 1x* eps=1e-07 float32 int32', ''): (int8[s0, 8], float32[s0, 1], int32[s0, 1])
%1 = getitem(%0, 0): int8[s0, 8]
%2 = getitem(%0, 1): float32[s0, 1]
%3 = getitem(%0, 2): int32[s0, 1]
%4 = qfuse.dequantize(%1, %2, %3, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): float32[s0, 8]
%5 = aten.neg(%4): float32[s0, 8]
return (%5)""",
    )


@pytest.mark.numeric
def test_golden_a_gelu_is_quantized_with_given_parameters_and_kept() -> None:
    g = Graph("m", 8)
    y = activated(g, g.x, "act(gelu_tanh)")
    program = g.done(stored(g, y), y)

    assert fused(program, m=3).fired == {"fuse-activation-quantize": 1}
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[s0, 8]
const %scale1: float32[1, 1]
const %zero2: int32[1, 1]
%0 = qfuse.activation(%x, None, None, '', 'act(gelu_tanh)', (), %scale1, %zero2, 'int8[-128,127] *x* float32 float32:reciprocal:round-zp int', '', 'float'): (int8[s0, 8], float32[s0, 8])
%1 = getitem(%0, 0): int8[s0, 8]
%2 = getitem(%0, 1): float32[s0, 8]
%3 = qfuse.dequantize(%1, %scale1, %zero2, 'int8[-128,127] *x* float32 float32:reciprocal:round-zp int'): float32[s0, 8]
%4 = aten.neg(%3): float32[s0, 8]
%5 = aten.neg(%2): float32[s0, 8]
return (%4, %5)""",
    )


HOW = ["static", "channel", "dynamic", "token", "symmetric", "group"]


# Every activation with every granularity, gated and not; each of them with every dtype.
@pytest.mark.numeric
@pytest.mark.parametrize(
    ("name", "how", "gate", "dtype"),
    [
        (name, how, gate, (torch.float32, torch.bfloat16, torch.float16)[(i + j + gate) % 3])
        for i, name in enumerate(ACTS)
        for j, how in enumerate(HOW)
        for gate in (False, True)
    ],
    ids=str,
)
def test_bits_stay(name: str, how: str, gate: bool, dtype: torch.dtype) -> None:
    g = Graph("m", 3, 9 if how != "group" else 11, dtype=dtype)
    y = activated(g, g.x, name)
    if gate:
        up = g.b.arg("u", dtype, *[s if isinstance(s, int) else "m" for s in shape_of(g.x)])
        y = times(g, up, y)
    program = g.done(stored(g, y, how))

    assert fused(program, m=5).fired == {"fuse-activation-quantize": 1}
    assert epilogues(program) == [f"{name}|mul(0)" if gate else name]


@pytest.mark.numeric
@pytest.mark.parametrize("shape", [(1, 1), (0, 4), (7, 33), (2, 1, 3, 17), (5,)], ids=str)
@pytest.mark.parametrize("how", ["static", "token"])
def test_odd_sizes(shape: tuple[int, ...], how: str) -> None:
    g = Graph(*shape)
    up = g.b.arg("u", torch.float32, *shape)
    program = g.done(stored(g, times(g, activated(g, g.x), up), how))

    assert fused(program).modified


@pytest.mark.numeric
@pytest.mark.parametrize("storage", [torch.uint8, torch.int16, torch.float8_e4m3fn])
def test_other_storage(storage: torch.dtype) -> None:
    g = Graph("m", 8)
    y = activated(g, g.x)
    low, high = (-448, 448) if storage.is_floating_point else (0, 15)
    spec = spec_of(None, None, dtype=torch.uint8)
    spec = type(spec)(storage, low, high, (None, None))
    scale = g.constant(torch.tensor([[0.02]]), "scale")
    program = g.done(g.dequantize(g.quantize(y, spec, (scale, None)), spec, (scale, None)))

    assert fused(program, m=3).modified


@pytest.mark.numeric
def test_a_dequantize_in_front_is_taken_along() -> None:
    g = Graph(1)
    q = g.stored(6, 8)
    spec = spec_of(1, 4)
    x = g.dequantize(q, spec, g.params(q, spec))
    program = g.done(stored(g, activated(g, x), "token"), x)

    fused(program)
    (view,) = [v for v in map(as_activation, program.graph.nodes) if v is not None]
    assert view.x is q
    assert view.x_params is not None
    assert view.x_params.spec == spec


@pytest.mark.numeric
def test_a_dequantize_of_two_levels_in_front_stays_outside() -> None:
    g = Graph(4, 32)
    x = two_levels(g, g.x)
    program = g.done(stored(g, activated(g, x), "token"))

    assert fused(program).fired == {"fuse-activation-quantize": 1}
    (view,) = [v for v in map(as_activation, program.graph.nodes) if v is not None]
    assert (view.x, view.x_params) == (x, None)


@pytest.mark.numeric
@pytest.mark.parametrize("how", ["static", "token"])
def test_the_float_result_is_kept_with_its_strides(how: str) -> None:
    g = Graph(4, 6)
    turned = g.call(aten.transpose.int, g.x, 0, 1)
    y = activated(g, turned)
    early = g.call(aten.sum.dim_IntList, y, [0])
    real = stored(g, y, how)
    program = g.b.done(y, early, real)

    assert fused(program).modified
    assert epilogues(program) == ["act(silu)"]


@pytest.mark.numeric
def test_two_quantizes_of_one_result() -> None:
    g = Graph("m", 8)
    y = activated(g, g.x)
    program = g.done(stored(g, y), stored(g, y, "token"))

    assert fused(program, m=3).fired == {"fuse-activation-quantize": 1}


@pytest.mark.numeric
def test_a_chosen_zero_point_that_is_read_elsewhere() -> None:
    g = Graph("m", 8)
    y = activated(g, g.x)
    spec = spec_of(1, None)
    scale, zero = g.choose(y, (1, None))
    real = g.dequantize(g.quantize(y, spec, (scale, zero)), spec, (scale, zero))
    program = g.b.done(real, scale, g.call(aten.neg.default, zero))

    assert fused(program, m=3).modified


@pytest.mark.numeric
def test_a_linear_keeps_its_activation_and_the_factor() -> None:
    g = Graph("m", 8)
    block = QuantizedLinear(g.b, 4, 8)
    gate = g.call(aten.silu.default, block.linear(block.quantized(g.x, per_tensor(2)), "gate"))
    up = g.b.arg("u", torch.float32, "m", 4)
    program = g.done(stored(g, times(g, gate, up), "token"), stored(g, g.x, "token"))
    source = clone(program)
    done = optimize(program)

    names = [str(n.args[12]) for n in done.graph.nodes if n.target is ops.linear]
    assert names == ["act(silu)|mul(0)"]
    assert epilogues(done) == [""]
    inputs = random_inputs(done, m=5)
    for new, old in zip(run(done, inputs), run(source, inputs), strict=True):
        assert equal_but_for_nan(new, old)


@pytest.mark.numeric
def test_parameters_that_were_computed_before_are_given() -> None:
    g = Graph("m", 8)
    y = activated(g, g.x)
    spec = spec_of(1, None)
    params = g.choose(g.x, (1, None))
    program = g.done(g.dequantize(g.quantize(y, spec, params), spec, params))

    assert fused(program, m=2).modified


def test_refuses_parameters_of_something_behind_it() -> None:
    g = Graph("m", 8)
    y = activated(g, g.x)
    spec = spec_of(1, None)
    params = g.choose(g.call(aten.neg.default, y), (1, None))
    program = g.done(g.dequantize(g.quantize(y, spec, params), spec, params))

    miss = refused(program, m=2)
    assert (miss.code, miss.at) == (MissCode.ORDER, params[0])


def test_refuses_a_zero_point_of_something_else() -> None:
    g = Graph("m", 8)
    y = activated(g, g.x)
    spec = spec_of(1, None)
    scale, zero = g.choose(y, (1, None))[0], g.choose(g.x, (1, None))[1]
    program = g.done(g.dequantize(g.quantize(y, spec, (scale, zero)), spec, (scale, zero)))

    assert refused(program, m=2).code is MissCode.ZERO_POINT


def test_refuses_a_chosen_zero_point_that_is_left_out() -> None:
    g = Graph("m", 8)
    y = activated(g, g.x)
    spec = spec_of(1, None)
    scale, _ = g.choose(y, (1, None))
    program = g.done(g.dequantize(g.quantize(y, spec, (scale, None)), spec, (scale, None)))

    assert refused(program, m=2).code is MissCode.ZERO_POINT


def test_refuses_scales_of_two_levels() -> None:
    g = Graph(4, 32)
    program = g.done(two_levels(g, activated(g, g.x)))

    assert refused(program).code is MissCode.GRANULARITY


def test_refuses_a_choice_relative_to_a_second_level_that_is_not_used() -> None:
    g = Graph(4, 32)
    y = activated(g, g.x)
    outer = g.constant(torch.full((1, 1), 0.25), "outer")
    choose = ChooseSpec(
        Formula.NVFP4, CONTAINER, -6, 6, (1, 16), 0.015625, E4M3, element=Element.E2M1, outer=True
    )
    scale = g.b.item(g.call(ops.choose_qparams, y, str(choose), outer), 0)
    spec = replace(nv(1, 16), outer=None)
    program = g.done(g.dequantize(g.quantize(y, spec, (scale, None)), spec, (scale, None)))

    assert refused(program).code is MissCode.GRANULARITY


def test_refuses_scales_chosen_in_another_format() -> None:
    g = Graph(4, 32)
    y = activated(g, g.x)
    choose = ChooseSpec(
        Formula.MX_RCEIL, CONTAINER, -6, 6, (1, 16), 0.0, torch.float8_e8m0fnu, element=Element.E2M1
    )
    scale = g.b.item(g.call(ops.choose_qparams, y, str(choose)), 0)
    spec = replace(mx(1, 16), scale_format=ScaleFormat.FLOAT)
    quantize = as_quantize(g.quantize(y, spec, (scale, None)))
    assert quantize is not None

    found = quantized_result(quantize)
    assert isinstance(found, Miss)
    assert found.code is MissCode.DTYPE


@pytest.mark.numeric
@pytest.mark.parametrize("left", [False, True])
def test_what_a_product_does_not_take_along_is_quantized_by_itself(left: bool) -> None:
    g = Graph("m", 8)
    mine = stored(g, activated(g, g.x, "act(relu)"))
    other = activated(g, g.b.arg("u", torch.float32, "m", 8), "act(sigmoid)")
    # The product takes the other activation, and reads this one as a factor of a half.
    half = g.call(aten.mul.Tensor, mine, g.b.arg("h", torch.float32, "m", 8))
    program = g.done(stored(g, times(g, *([half, other] if left else [other, half]))))

    assert fused(program, m=3).fired == {"fuse-activation-quantize": 2}
    assert sorted(epilogues(program)) == ["act(relu)", "act(sigmoid)|mul(0)"]


@pytest.mark.numeric
def test_what_a_product_rounds_is_quantized_by_itself_if_the_product_cannot_fuse() -> None:
    g = Graph(4, 32)
    up = g.b.arg("u", torch.float32, 4, 32)
    product = times(g, stored(g, activated(g, g.x)), up)
    program = g.done(two_levels(g, product))

    assert fused(program).fired == {"fuse-activation-quantize": 1}
    assert epilogues(program) == ["act(silu)"]


def test_refuses_parameters_chosen_for_another_type() -> None:
    g = Graph("m", 8)
    y = activated(g, g.x)
    spec = spec_of(1, None, dtype=torch.uint8)
    params = g.choose(y, (1, None))
    program = g.done(g.dequantize(g.quantize(y, spec, params), spec, params))

    assert refused(program, m=2).code is MissCode.DTYPE


def test_refuses_factors_in_other_orders_of_axes() -> None:
    g = Graph(4, 6)
    up = g.call(aten.transpose.int, g.b.arg("u", torch.float32, 6, 4), 0, 1)
    program = g.done(stored(g, times(g, up, activated(g, g.x))))

    assert refused(program).code is MissCode.SHAPE
