from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.sources.aten_spellings import (
    assert_same_values,
    aten,
    calls,
    finish,
    golden,
)

from qfuse.ir.events import MissCode
from qfuse.ir.graph.stage_graph import CapturedGraph
from qfuse.ir.ops.linear import as_fused_linear
from qfuse.normalize import normalize
from qfuse.normalize.aten.activations.squared_relu import SpellSquaredRelu
from qfuse.optimize import optimize
from qfuse.rewrite.driver import apply_rules
from qfuse.testing.build import GraphBuilder
from qfuse.testing.run import run
from qfuse.testing.terms import Term, linear_result

Form = Callable[[Term], Term]


def square(x: Term) -> Term:
    return x.call(aten.pow.Tensor_Scalar, 2)


def relu(x: Term) -> Term:
    return x.call(aten.relu.default)


def zeros(x: Term) -> Term:
    return x.call(aten.zeros_like.default)


def zero(x: Term) -> Term:
    return Term(x.b, x.b.const("zero", torch.tensor(0.0)))


def where(x: Term, compare: Any, one: Any, other: Any) -> Term:
    condition = x.call(compare, 0)
    op = aten.where.self if isinstance(one, Term) and isinstance(other, Term) else None
    op = op or (aten.where.ScalarSelf if isinstance(other, Term) else aten.where.ScalarOther)
    return condition.call(op, one, other)


FORMS: dict[str, Form] = {
    "where le": lambda x: where(x, aten.le.Scalar, 0, x * x),
    "where lt": lambda x: where(x, aten.lt.Scalar, 0.0, square(x)),
    "where zeros": lambda x: where(x, aten.le.Scalar, zeros(x), x * x),
    "where zero": lambda x: where(x, aten.le.Scalar, zero(x), x.call(aten.square.default)),
    "square of a where": lambda x: square(where(x, aten.le.Scalar, 0, x)),
    "maximum": lambda x: square(x.call(aten.maximum.default, zero(x))),
    "maximum of zeros": lambda x: square(zeros(x).call(aten.maximum.default, x)),
    "clamp": lambda x: square(x.call(aten.clamp.default, 0)),
    "clamp_min": lambda x: x.call(aten.clamp_min.default, 0.0).call(aten.square.default),
    "threshold": lambda x: square(x.call(aten.threshold.default, 0, 0)),
    "masked_fill": lambda x: square(x.call(aten.masked_fill.Scalar, x.call(aten.le.Scalar, 0), 0)),
    "product of two": lambda x: relu(x) * relu(x),
}
DROP_NAN: dict[str, Form] = {
    "where gt": lambda x: where(x, aten.gt.Scalar, x * x, 0),
    "where ge": lambda x: where(x, aten.ge.Scalar, square(x), zeros(x)),
    "square of a where": lambda x: square(where(x, aten.gt.Scalar, x, 0)),
}
OTHERS: dict[str, Form] = {
    "negative zero": lambda x: where(x, aten.le.Scalar, -0.0, x * x),
    "another number": lambda x: where(x, aten.le.Scalar, 1, x * x),
    "swapped": lambda x: where(x, aten.le.Scalar, x * x, 0),
    "another bound": lambda x: square(x.call(aten.clamp_min.default, 0.5)),
    "an upper bound": lambda x: square(x.call(aten.clamp.default, 0, 1)),
    "another power": lambda x: relu(x).call(aten.pow.Tensor_Scalar, 3),
    "of two values": lambda x: relu(x) * relu(x + 1),
    "times itself": lambda x: relu(x) * x,
    "a mask": lambda x: square(x * x.call(aten.gt.Scalar, 0)),
    "spelled": lambda x: square(relu(x)),
}
SPECIAL = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-30, -1e-30, 3.0, -3.0, 1e30])


def source(form: Form, dtype: torch.dtype = torch.float32) -> CapturedGraph:
    b = GraphBuilder()
    return finish(b, form(linear_result(b, dtype)).node)


def test_golden_a_where() -> None:
    assert_expected_inline(
        golden(source(FORMS["where le"]), SpellSquaredRelu()),
        """\
const %w_s: float32[16, 1]
const %w: int8[16, 8]
%0 = qfuse.dequantize(%w, %w_s, None, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): float32[16, 8]
%x: float32[s0, 8]
%1 = aten.linear(%x, %0): float32[s0, 16]
%2 = aten.relu(%1): float32[s0, 16]
%3 = aten.square(%2): float32[s0, 16]
return (%3)
fired: spell-squared-relu 1""",
    )


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_values_are_the_same_bits(name: str, dtype: torch.dtype) -> None:
    program = source(FORMS[name], dtype)
    assert_same_values(program, [torch.randn(33, 8).to(dtype)], SpellSquaredRelu(), exact=True)

    assert calls(program)[2:] == ["aten.relu", "aten.square"]


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_what_is_not_finite_stays(name: str, dtype: torch.dtype) -> None:
    special, b = SPECIAL.to(dtype), GraphBuilder()
    form = FORMS[name](Term(b, b.arg("x", dtype, len(special))))
    (old,) = run(finish(b, form.node), [special])

    assert torch.equal(old.isnan(), special.isnan())
    squared = special.relu().square()
    assert torch.equal(old.nan_to_num(), squared.nan_to_num())
    assert torch.equal(old.signbit(), squared.signbit())


@pytest.mark.numeric
@pytest.mark.parametrize("name", FORMS)
def test_it_becomes_an_activation_of_the_linear(name: str) -> None:
    done = optimize(normalize(source(FORMS[name])))

    (fused,) = [view for node in done.graph.nodes if (view := as_fused_linear(node))]
    assert str(fused.epilogue) == "act(squared_relu)"


@pytest.mark.parametrize("name", DROP_NAN)
def test_refuses_what_is_not_nan_for_nan(name: str) -> None:
    result = apply_rules(source(DROP_NAN[name]), [SpellSquaredRelu()])
    (miss,) = [m for _, m in result.misses]

    assert not result.modified
    assert miss.code is MissCode.ARITHMETIC
    assert "0 where its operand is NaN" in miss.reason


@pytest.mark.parametrize("name", OTHERS)
def test_refuses_other_arithmetic(name: str) -> None:
    result = apply_rules(source(OTHERS[name]), [SpellSquaredRelu()])

    assert (result.modified, list(result.misses)) == (False, [])


def test_refuses_what_follows_no_quantized_product() -> None:
    b = GraphBuilder()
    x = Term(b, b.arg("x", torch.float32, 3, 8))
    program = finish(b, FORMS["where le"](x).node)
    result = apply_rules(program, [SpellSquaredRelu()])

    assert (result.modified, list(result.misses)) == (False, [])


def test_refuses_zeros_of_another_type() -> None:
    b = GraphBuilder()
    x = linear_result(b, torch.bfloat16)
    wide = Term(b, b.call(aten.zeros_like.default, x.node, dtype=torch.float32))
    program = finish(b, where(x, aten.le.Scalar, wide, x * x).node)
    result = apply_rules(program, [SpellSquaredRelu()])

    assert (result.modified, list(result.misses)) == (False, [])
