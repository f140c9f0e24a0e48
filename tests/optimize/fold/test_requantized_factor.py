"""A factor between a dequantize and a quantize."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.sources.aten_spellings import golden
from torch.fx import Node

from qfuse.ir.events import MissCode
from qfuse.ir.graph.stage_graph import NormalGraph
from qfuse.ir.graph.text import to_text
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.qdq import as_requantize
from qfuse.optimize import optimize
from qfuse.optimize.fold.requantized_factor import FoldRequantizedFactor
from qfuse.rewrite.clone import clone
from qfuse.rewrite.driver import apply_rules
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import per_tensor
from qfuse.testing.run import run
from qfuse.testing.terms import aten

Form = Callable[[GraphBuilder, Node], Node]


def source(
    form: Form,
    *,
    scale: float = 0.0237,
    dtype: torch.dtype = torch.int8,
    float_dtype: torch.dtype = torch.float32,
) -> NormalGraph:
    b = GraphBuilder()
    spec = per_tensor(2, dtype, float_dtype=float_dtype)
    zero = b.const("zero", torch.tensor([[3]], dtype=torch.int32))
    first = b.const("s", torch.tensor([[scale]])), zero, str(spec)
    real = b.call(ops.dequantize, b.arg("q", dtype, 16, 16), *first)
    second = b.const("t", torch.tensor([[0.031]])), zero, str(spec)
    return b.done(b.call(ops.quantize, form(b, real), *second))


def multiplied(by: float) -> Form:
    return lambda b, real: b.call(aten.mul.Tensor, real, by)


def test_golden() -> None:
    assert_expected_inline(
        golden(source(multiplied(0.5)), FoldRequantizedFactor()),
        """\
const %zero: int32[1, 1]
%q: int8[16, 16]
const %t: float32[1, 1]
const %s_scaled: float32[1, 1]
%0 = qfuse.dequantize(%q, %s_scaled, %zero, 'int8[-128,127] *x* float32 float32:reciprocal:round-zp int'): float32[16, 16]
%1 = qfuse.quantize(%0, %t, %zero, 'int8[-128,127] *x* float32 float32:reciprocal:round-zp int'): int8[16, 16]
return (%1)
fired: fold-requantized-factor 1""",
    )


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
@pytest.mark.parametrize(
    "form",
    [
        multiplied(0.5),
        multiplied(4),
        lambda b, real: b.call(aten.div.Tensor, real, 8.0),
        lambda b, real: b.call(aten.mul.Tensor, b.const("c", torch.tensor([0.25])), real),
    ],
)
def test_it_is_one_requantize_with_the_same_bits(form: Form, dtype: torch.dtype) -> None:
    program = source(form, dtype=dtype)
    before = clone(program)
    done = optimize(program)
    calls = [node for node in done.graph.nodes if node.op == "call_function"]
    assert len(calls) == 1
    assert as_requantize(calls[0]) is not None
    info = torch.iinfo(dtype)
    q = torch.arange(info.min, info.max + 1).to(dtype).reshape(16, 16)
    assert torch.equal(run(done, [q])[0], run(before, [q])[0])


def test_a_folded_factor_of_three_would_change_a_tie() -> None:
    """Why other factors are refused: the product is rounded before, or after."""
    q, s, c = torch.arange(-128, 128).float(), torch.rand(4096, 1) * 0.05, torch.tensor(0.3)
    assert not torch.equal(q * s * c, q * (s * c))


@pytest.mark.parametrize(
    ("program", "code"),
    [
        (source(multiplied(0.3)), MissCode.ARGUMENT),
        (source(multiplied(-0.5)), MissCode.ARGUMENT),
        (source(multiplied(0.0)), MissCode.ARGUMENT),
        (source(multiplied(float("inf"))), MissCode.ARGUMENT),
        (source(multiplied(0.5), scale=1e-30), MissCode.RANGE),
        (source(multiplied(2.0**-80)), MissCode.RANGE),
        (source(multiplied(0.5), float_dtype=torch.bfloat16), MissCode.DTYPE),
    ],
)
def test_refuses(program: NormalGraph, code: MissCode) -> None:
    before = to_text(program.graph)
    result = apply_rules(program, [FoldRequantizedFactor()])
    assert not result.modified
    assert to_text(program.graph) == before
    ((_, miss),) = result.misses
    assert miss.code is code


def test_leaves_a_factor_with_other_users() -> None:
    b = GraphBuilder()
    spec = per_tensor(2)
    scale = b.const("s", torch.tensor([[0.02]]))
    real = b.call(ops.dequantize, b.arg("q", torch.int8, 4, 4), scale, None, str(spec))
    half = b.call(aten.mul.Tensor, real, 0.5)
    program = b.done(b.call(ops.quantize, half, scale, None, str(spec)), half)
    assert not apply_rules(program, [FoldRequantizedFactor()]).modified
