from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.sources.aten_spellings import (
    assert_same_values,
    aten,
    calls,
    codes,
    finish,
    golden,
    scales,
)
from torch.fx import Node

from qfuse.ir.events import MissCode
from qfuse.ir.graph.stage_graph import CapturedGraph
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.matmul import as_fused_matmul
from qfuse.normalize import normalize
from qfuse.normalize.aten.linear.spell_matmul import SpellBatchedSum, SpellMatmul
from qfuse.optimize import optimize
from qfuse.rewrite.driver import apply_rules
from qfuse.rewrite.rule import Miss
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import per_tensor
from qfuse.testing.run import random_inputs, run

F32 = torch.float32


class Case:
    """Two dequantized activations; ``k`` is stored as ``[K, N]`` or, for a linear, ``[N, K]``."""

    def __init__(self, rank: int = 3, dtype: torch.dtype = F32, *, constant: bool = False) -> None:
        self.b = GraphBuilder()
        batch = (2,) if rank == 3 else ()
        self.shapes = {"q": (*batch, 4, 8), "k": (*batch, 8, 6)}
        self.dtype = dtype
        self.x = self.dequantized("q", self.shapes["q"])
        self.k = self.dequantized("k", self.shapes["k"], constant=constant)

    def dequantized(self, name: str, shape: tuple[int, ...], *, constant: bool = False) -> Node:
        """A dequantize of an input, or of a constant."""
        b = self.b
        q = b.const(name, codes(*shape)) if constant else b.arg(name, torch.int8, *shape)
        spec = replace(per_tensor(len(shape)), float_dtype=self.dtype)
        scale = b.const(f"{name}_scale", torch.full((1,) * len(shape), 0.05))
        return b.call(ops.dequantize, q, scale, None, str(spec))

    def summand(self, *shape: int) -> Node:
        """Another input."""
        return self.b.arg("y", self.dtype, *shape)

    def done(self, out: Node) -> CapturedGraph:
        """Finish the graph."""
        return finish(self.b, out)


def refusal(program: CapturedGraph) -> Miss:
    """Return why the rule, which must refuse once, does not fire."""
    result = apply_rules(program, [SpellMatmul()])
    assert not result.modified
    (miss,) = [m for _, m in result.misses]
    return miss


def test_golden_a_sum_with_factors() -> None:
    case = Case()
    y = case.summand(2, 4, 6)
    out = case.b.call(aten.baddbmm.default, y, case.x, case.k, beta=0.5, alpha=0.25)
    assert_expected_inline(
        golden(case.done(out), SpellMatmul()),
        """\
%q: int8[2, 4, 8]
const %q_scale: float32[1, 1, 1]
%0 = qfuse.dequantize(%q, %q_scale, None, 'int8[-128,127] *x*x* float32 float32:reciprocal:round-zp int'): float32[2, 4, 8]
%k: int8[2, 8, 6]
const %k_scale: float32[1, 1, 1]
%1 = qfuse.dequantize(%k, %k_scale, None, 'int8[-128,127] *x*x* float32 float32:reciprocal:round-zp int'): float32[2, 8, 6]
%y: float32[2, 4, 6]
%2 = aten.matmul(%0, %1): float32[2, 4, 6]
%3 = aten.mul.Tensor(%2, 0.25): float32[2, 4, 6]
%4 = aten.add.Tensor(%3, %y, alpha=0.5): float32[2, 4, 6]
return (%4)
fired: spell-matmul 1""",
    )


SHAPES = [(2, 4, 6), (6,), (1, 6), (1, 1, 1), (2, 1, 6), (4, 1), ()]


@pytest.mark.numeric
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("factors", [{}, {"alpha": 0.3}, {"beta": -2}, {"alpha": -3, "beta": 0.7}])
def test_summands_of_all_shapes(shape: tuple[int, ...], factors: dict[str, float]) -> None:
    case = Case()
    y = case.summand(*shape)
    program = case.done(case.b.call(aten.baddbmm.default, y, case.x, case.k, **factors))

    given = [codes(2, 4, 8), codes(2, 8, 6), torch.randn(shape)]
    assert_same_values(program, given, SpellMatmul())
    assert "aten.matmul" in calls(program)


@pytest.mark.numeric
def test_a_beta_of_zero_does_not_look_at_the_summand() -> None:
    case = Case(rank=2)
    y = case.summand(4, 6)
    program = case.done(case.b.call(aten.addmm.default, y, case.x, case.k, beta=0, alpha=0.5))

    given = [codes(4, 8), codes(8, 6), torch.full((4, 6), math.nan)]
    assert_same_values(program, given, SpellMatmul())
    assert "aten.add.Tensor" not in calls(program)


@pytest.mark.numeric
@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_of_two_activations(rank: int, bias: bool) -> None:
    case = Case(rank)
    weight = case.dequantized("w", (6, 8))
    more = [case.summand(6)] if bias else []
    program = case.done(case.b.call(aten.linear.default, case.x, weight, *more))

    given = [codes(*case.shapes["q"]), codes(*case.shapes["k"]), codes(6, 8)]
    assert_same_values(program, [*given, *([torch.randn(6)] if bias else [])], SpellMatmul())
    assert "aten.linear" not in calls(program)


@pytest.mark.numeric
def test_an_operand_that_is_scaled_at_run_time() -> None:
    case = Case()
    b = case.b
    cast = b.call(aten._to_copy.default, b.arg("c", torch.int8, 2, 8, 6), dtype=F32)
    keys = b.call(aten.mul.Tensor, cast, b.arg("s", F32, 2, 1, 6))
    y = case.summand(4, 6)
    program = normalize(case.done(b.call(aten.baddbmm.default, y, case.x, keys)))

    left = calls(program)
    assert left.count("qfuse.dequantize") == 2
    assert "aten.baddbmm" not in left


@pytest.mark.numeric
@pytest.mark.parametrize("op", [aten.addmm.default, aten.linear.default])
def test_it_becomes_one_op(op: torch._ops.OpOverload) -> None:
    case = Case(rank=2)
    if op is aten.linear.default:
        out = case.b.call(op, case.x, case.dequantized("w", (6, 8)), case.summand(6))
    else:
        out = case.b.call(op, case.summand(4, 6), case.x, case.k, beta=0.5, alpha=0.125)
    program = case.done(out)
    given = [codes(4, 8), codes(8, 6)]
    given += [codes(6, 8), torch.randn(6)] if op is aten.linear.default else [torch.randn(4, 6)]
    (want,) = run(program, given)
    done = optimize(normalize(program))

    (fused,) = [view for node in done.graph.nodes if (view := as_fused_matmul(node))]
    assert "add(" in str(fused.epilogue)
    torch.testing.assert_close(run(done, given)[0], want)


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_in_16_bits_a_product_without_a_sum(dtype: torch.dtype) -> None:
    case = Case(rank=2, dtype=dtype)
    weight = case.dequantized("w", (6, 8))
    program = case.done(case.b.call(aten.linear.default, case.x, weight))

    assert_same_values(program, [codes(4, 8), codes(8, 6), codes(6, 8)], SpellMatmul())
    assert "aten.matmul" in calls(program)


@pytest.mark.parametrize("kind", ["sum", "factor"])
def test_refuses_to_round_twice_in_16_bits(kind: str) -> None:
    case = Case(rank=2, dtype=torch.bfloat16)
    more = {} if kind == "sum" else {"beta": 0, "alpha": 0.3}
    y = case.summand(4, 6)
    miss = refusal(case.done(case.b.call(aten.addmm.default, y, case.x, case.k, **more)))

    assert miss.code is MissCode.ARITHMETIC
    assert f"before the {kind}" in miss.reason


@pytest.mark.parametrize("more", [{"alpha": 0}, {"alpha": math.inf}, {"beta": math.nan}])
def test_refuses_factors(more: dict[str, float]) -> None:
    case = Case(rank=2)
    y = case.summand(4, 6)
    miss = refusal(case.done(case.b.call(aten.addmm.default, y, case.x, case.k, **more)))

    assert miss.code is MissCode.ARGUMENT


def test_refuses_a_vector() -> None:
    case = Case(rank=2)
    x = case.dequantized("v", (8,))
    weight = case.dequantized("w", (6, 8))
    assert refusal(case.done(case.b.call(aten.linear.default, x, weight))).code is MissCode.SHAPE


@pytest.mark.parametrize("kind", ["weight", "quantized weight", "float"])
def test_what_is_not_its_business(kind: str) -> None:
    case = Case(rank=2, constant=kind == "weight")
    b = case.b
    if kind == "float":
        case.k = b.arg("plain", F32, 8, 6)
    elif kind == "quantized weight":
        spec = str(per_tensor(2))
        one = b.const("one", scales(1, 1))
        q = b.call(ops.quantize, b.const("w", torch.randn(8, 6)), one, None, spec)
        case.k = b.call(ops.dequantize, q, one, None, spec)
    program = case.done(b.call(aten.addmm.default, case.summand(6), case.x, case.k))
    result = apply_rules(program, [SpellMatmul()])

    assert (result.modified, list(result.misses)) == (False, [])


def batched_sum(dtype: torch.dtype = F32, **factors: float) -> CapturedGraph:
    """Return a ``baddbmm`` with a batch of quantized weights."""
    case = Case(dtype=dtype)
    x = case.b.arg("plain", dtype, 2, 4, 8)
    weights = case.dequantized("w", (2, 8, 6), constant=True)
    y = case.summand(2, 1, 6)
    return case.done(case.b.call(aten.baddbmm.default, y, x, weights, **factors))


def test_golden_a_batch_of_weights() -> None:
    assert_expected_inline(
        golden(batched_sum(beta=2), SpellBatchedSum()),
        """\
%q: int8[2, 4, 8]
const %q_scale: float32[1, 1, 1]
%0 = qfuse.dequantize(%q, %q_scale, None, 'int8[-128,127] *x*x* float32 float32:reciprocal:round-zp int'): float32[2, 4, 8]
%k: int8[2, 8, 6]
const %k_scale: float32[1, 1, 1]
%1 = qfuse.dequantize(%k, %k_scale, None, 'int8[-128,127] *x*x* float32 float32:reciprocal:round-zp int'): float32[2, 8, 6]
%plain: float32[2, 4, 8]
const %w: int8[2, 8, 6]
const %w_scale: float32[1, 1, 1]
%2 = qfuse.dequantize(%w, %w_scale, None, 'int8[-128,127] *x*x* float32 float32:reciprocal:round-zp int'): float32[2, 8, 6]
%y: float32[2, 1, 6]
%3 = aten.matmul(%plain, %2): float32[2, 4, 6]
%4 = aten.add.Tensor(%3, %y, alpha=2): float32[2, 4, 6]
return (%4)
fired: spell-batched-sum 1""",
    )


@pytest.mark.numeric
@pytest.mark.parametrize("factors", [{}, {"alpha": 0.3}, {"alpha": -2, "beta": 0.7}, {"beta": 0}])
def test_sums_of_a_batch_of_weights(factors: dict[str, Any]) -> None:
    program = batched_sum(**factors)
    assert assert_same_values(program, random_inputs(program), SpellBatchedSum()).fired


@pytest.mark.parametrize(
    ("program", "code"),
    [
        (lambda: batched_sum(alpha=0), MissCode.ARGUMENT),
        (lambda: batched_sum(torch.bfloat16), MissCode.ARITHMETIC),
    ],
    ids=["factor", "16 bits"],
)
def test_refuses_sums_of_a_batch_of_weights(
    program: Callable[[], CapturedGraph], code: MissCode
) -> None:
    (miss,) = [m for _, m in apply_rules(program(), [SpellBatchedSum()]).misses]
    assert miss.code is code


def test_a_batch_of_activations_is_not_its_business() -> None:
    case = Case()
    program = case.done(case.b.call(aten.baddbmm.default, case.summand(6), case.x, case.k))
    assert not apply_rules(program, [SpellBatchedSum()]).modified
