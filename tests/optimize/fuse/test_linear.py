from __future__ import annotations

import importlib

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.values import bits_same

from qfuse.ir.events import MissCode
from qfuse.ir.graph.stage_graph import REFUSED_META, NormalGraph
from qfuse.ir.graph.text import to_text
from qfuse.ir.ops import library as ops
from qfuse.optimize.fuse.linear import FuseLinear
from qfuse.rewrite.clone import clone
from qfuse.rewrite.driver import apply_rules
from qfuse.rewrite.rule import Miss
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import QuantizedLinear, per_channel, per_tensor, per_token
from qfuse.testing.run import random_inputs, run


def test_golden_two_readers_of_one_dequantize_both_fuse() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, "m", 8)
    block = QuantizedLinear(b, 4, 8, bias=False)
    real = block.quantized(x, per_tensor(2))
    program = b.done(block.linear(real, "u"), block.linear(real, "v"), real)

    result = apply_rules(program, [FuseLinear()])

    assert result.fired == {"fuse-linear": 2}
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[s0, 8]
const %x_scale: float32[1, 1]
const %x_zero: int32[1, 1]
%0 = qfuse.quantize(%x, %x_scale, %x_zero, 'int8[-128,127] *x* float32 float32:reciprocal:round-zp int'): int8[s0, 8]
%1 = qfuse.dequantize(%0, %x_scale, %x_zero, 'int8[-128,127] *x* float32 float32:reciprocal:round-zp int'): float32[s0, 8]
const %u: int8[4, 8]
const %u_scale: float32[4, 1]
%2 = qfuse.linear(%0, %x_scale, %x_zero, 'int8[-128,127] *x* float32 float32:reciprocal:round-zp int', %u, %u_scale, None, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int', None, None, None, '', '', ()): float32[s0, 4]
const %v: int8[4, 8]
const %v_scale: float32[4, 1]
%3 = qfuse.linear(%0, %x_scale, %x_zero, 'int8[-128,127] *x* float32 float32:reciprocal:round-zp int', %v, %v_scale, None, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int', None, None, None, '', '', ()): float32[s0, 4]
return (%2, %3, %1)""",
    )


def test_golden_a_float_activation_gives_a_weight_only_linear() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 2, "m", 8)
    program = b.done(QuantizedLinear(b, 4, 8).linear(x))

    apply_rules(program, [FuseLinear()])

    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[2, s0, 8]
const %w: int8[4, 8]
const %w_scale: float32[4, 1]
const %w_bias: float32[4]
%0 = qfuse.linear(%x, None, None, '', %w, %w_scale, None, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int', %w_bias, None, None, '', '', ()): float32[2, s0, 4]
return (%0)""",
    )


def refusal(program: NormalGraph) -> tuple[MissCode, str]:
    """Apply the rule, which must refuse and leave the graph alone; return code and node."""
    before = to_text(program.graph)
    result = apply_rules(program, [FuseLinear()])
    assert not result.modified
    assert to_text(program.graph) == before
    (miss,) = [m for _, m in result.misses]
    return miss.code, miss.at.name


def test_refuses_a_float_weight() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 3, 8)
    real = QuantizedLinear(b, 4, 8).quantized(x, per_tensor(2))
    w = b.const("w", torch.randn(4, 8))
    program = b.done(b.call(torch.ops.aten.linear.default, real, w))

    assert refusal(program) == (MissCode.NOT_QUANTIZED, w.name)


@pytest.mark.parametrize("quantized", [True, False])
def test_refuses_one_entry_per_output_which_has_nothing_to_gain(quantized: bool) -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 3, 1)
    real = QuantizedLinear(b, 4, 1).quantized(x, per_tensor(2)) if quantized else x
    w = b.const("w", torch.randn(4, 1))
    program = b.done(b.call(torch.ops.aten.linear.default, real, w))

    assert refusal(program) == (MissCode.PROFIT, w.name)


def test_refuses_a_weight_of_an_op_that_no_dialect_translated() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 3, 8)
    q, zero = b.const("q", torch.zeros(4, 8, dtype=torch.int8)), b.const("z", torch.zeros(4).long())
    importlib.import_module("torch.ao.quantization.fx._decomposed")
    op = torch.ops.quantized_decomposed.dequantize_per_channel.default
    w = b.call(op, q, b.const("s", torch.rand(4)), zero, 0, -128, 127, torch.int8)
    program = b.done(b.call(torch.ops.aten.linear.default, x, w))
    (linear,) = program.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    miss = FuseLinear().match(linear)

    assert refusal(program) == (MissCode.NOT_QUANTIZED, w.name)
    assert isinstance(miss, Miss)
    assert miss.reason == (
        "the weight comes from quantized_decomposed.dequantize_per_channel, "
        "which no dialect translated"
    )
    w.meta[REFUSED_META] = "the rule normalize-it refused: its scale is float64"
    refused = FuseLinear().match(linear)
    assert isinstance(refused, Miss)
    assert refused.reason.endswith("which the rule normalize-it refused: its scale is float64")


def test_refuses_a_weight_that_is_an_input() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 3, 8)
    q = b.arg("q", torch.int8, 4, 8)
    scale = b.const("s", torch.rand(4, 1))
    w = b.call(ops.dequantize, q, scale, None, str(per_channel()))
    program = b.done(b.call(torch.ops.aten.linear.default, x, w))

    assert refusal(program) == (MissCode.NOT_CONSTANT, q.name)


def test_refuses_a_weight_that_the_program_writes() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 3, 8)
    q = b.const("q", torch.zeros(4, 8, dtype=torch.int8))
    q.meta["qfuse_mutable"] = True
    w = b.call(ops.dequantize, q, b.const("s", torch.rand(4, 1)), None, str(per_channel()))
    program = b.done(b.call(torch.ops.aten.linear.default, x, w))

    assert refusal(program) == (MissCode.NOT_CONSTANT, q.name)


@pytest.mark.numeric
@pytest.mark.parametrize("rank", [1, 2, 3, 4])
@pytest.mark.parametrize("spec", [per_tensor, per_token], ids=["tensor", "token"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_values_are_the_same_bits(rank: int, spec: object, dtype: torch.dtype) -> None:
    b = GraphBuilder()
    shape = [2, 1, 3][: rank - 1]
    x = b.arg("x", torch.float32, *shape, 8)
    made = per_tensor(rank, dtype) if spec is per_tensor else per_token(rank, dtype)
    block = QuantizedLinear(b, 5, 8)
    if made.block == per_tensor(rank).block:
        real = block.quantized(x, made)
    else:
        grid = [int(g) for g in made.grid((*shape, 8))]
        scale = b.const("scale", torch.rand(grid) * 0.02 + 1e-3)
        q = b.call(ops.quantize, x, scale, None, str(made))
        real = b.call(ops.dequantize, q, scale, None, str(made))
    program = b.done(block.linear(real))
    source = clone(program)

    assert apply_rules(program, [FuseLinear()]).fired == {"fuse-linear": 1}

    inputs = random_inputs(program)
    assert bits_same(run(program, inputs), run(source, inputs))
