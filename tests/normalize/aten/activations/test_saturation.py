from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.sources.aten_spellings import (
    assert_same_values,
    aten,
    calls,
    finish,
    golden,
    refusal,
)
from torch._ops import OpOverload

from qfuse.ir.events import MissCode
from qfuse.ir.graph.stage_graph import CapturedGraph
from qfuse.normalize.aten.activations.saturation import SpellSaturation, SpellSaturationAtZero
from qfuse.rewrite.driver import apply_rules
from qfuse.testing.build import GraphBuilder
from qfuse.testing.terms import Term

Form = Callable[[Term], Term]
SPECIAL = [math.nan, math.inf, -math.inf, 0.0, -0.0, -0.3, 1e-40, -128.5, 127.5, 1e30]


def bound(x: Term, value: float) -> Term:
    """Return a bound as a constant of one element."""
    return Term(x.b, x.b.const(f"bound_{int(value)}".replace("-", "minus_"), torch.tensor(value)))


def masked(x: Term, low: float, high: float) -> Term:
    filled = x.call(aten.masked_fill.Scalar, x.call(aten.gt.Scalar, high), high)
    return filled.call(aten.masked_fill.Scalar, x.call(aten.lt.Scalar, low), low)


def chosen(x: Term, low: float, high: float) -> Term:
    below = x.call(aten.lt.Scalar, low).call(aten.where.ScalarSelf, low, x)
    return x.call(aten.ge.Tensor, bound(x, high)).call(aten.where.self, bound(x, high), below)


def filled(x: Term, low: float, high: float) -> Term:
    least = x.call(aten.maximum.default, x.call(aten.full_like.default, low))
    return least.call(aten.minimum.default, x.call(aten.full_like.default, high))


FORMS: dict[str, Callable[[Term, float, float], Term]] = {
    "clip": lambda x, low, high: x.call(aten.clip.default, low, high),
    "hardtanh": lambda x, low, high: x.call(aten.hardtanh.default, low, high),
    "clamps": lambda x, low, high: x.call(aten.clamp_min.default, low).call(
        aten.clamp_max.default, high
    ),
    "clamp, clamp": lambda x, low, high: x.call(aten.clamp.default, None, high).call(
        aten.clamp.default, low
    ),
    "clamp by tensors": lambda x, low, high: x.call(
        aten.clamp.Tensor, bound(x, low), bound(x, high)
    ),
    "max, min": lambda x, low, high: x.call(aten.maximum.default, bound(x, low)).call(
        aten.minimum.default, bound(x, high)
    ),
    "min, max": lambda x, low, high: x.call(aten.min.other, bound(x, high)).call(
        aten.max.other, bound(x, low)
    ),
    "swapped": lambda x, low, high: bound(x, high).call(
        aten.minimum.default, bound(x, low).call(aten.maximum.default, x)
    ),
    "filled": filled,
    "where": chosen,
    "masked_fill": masked,
}


def program(form: Form, dtype: torch.dtype = torch.float32) -> CapturedGraph:
    b = GraphBuilder()
    return finish(b, form(Term(b, b.arg("x", dtype, 33, 8)).call(aten.round.default)).node)


def test_golden() -> None:
    assert_expected_inline(
        golden(program(lambda x: FORMS["max, min"](x, -128, 127)), SpellSaturation()),
        """\
%x: float32[33, 8]
%0 = aten.round(%x): float32[33, 8]
%1 = aten.clamp(%0, -128.0, 127.0): float32[33, 8]
return (%1)
fired: spell-saturation 1""",
    )


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", list(FORMS))
def test_values_are_equal(form: str, dtype: torch.dtype) -> None:
    x = torch.randn(33, 8) * 100
    x[: len(SPECIAL), 0] = torch.tensor(SPECIAL)
    source = program(lambda term: FORMS[form](term, -128, 127), dtype)
    result = assert_same_values(source, [x.to(dtype)], SpellSaturation(), exact=True)

    assert result.fired == {"spell-saturation": 1}
    assert calls(source) == ["aten.round", "aten.clamp"]


@pytest.mark.numeric
@pytest.mark.parametrize("form", list(FORMS))
def test_values_are_equal_at_zero(form: str) -> None:
    x = torch.randn(33, 8) * 100
    x[: len(SPECIAL), 0] = torch.tensor(SPECIAL)
    source = program(lambda term: FORMS[form](term, 0, 255))
    rules = SpellSaturation(), SpellSaturationAtZero()
    (result,) = (assert_same_values(source, [x], *rules, exact=False),)

    assert sum(result.fired.values()) == 1
    assert calls(source) == ["aten.round", "aten.clamp"]


@pytest.mark.numeric
def test_what_makes_a_negative_zero_positive_is_not_exact() -> None:
    """``where(x <= 0, 0, x)`` does, and ``where(x < 0, 0, x)`` does not."""

    def replaced(x: Term, op: OpOverload) -> Term:
        return x.call(op, 0).call(aten.where.ScalarSelf, 0, x).call(aten.clamp_max.default, 255)

    x = torch.randn(33, 8)  # many are rounded to a negative zero
    below = program(lambda term: replaced(term, aten.lt.Scalar))
    assert_same_values(below, [x], SpellSaturation(), exact=True)
    assert calls(below) == ["aten.round", "aten.clamp"]

    source = program(lambda term: replaced(term, aten.le.Scalar))
    assert not apply_rules(source, [SpellSaturation()]).modified
    assert apply_rules(source, [SpellSaturationAtZero()]).modified


@pytest.mark.parametrize(
    ("form", "code"),
    [
        (lambda x: FORMS["clamps"](x, 5, -5), MissCode.RANGE),
        (lambda x: FORMS["max, min"](x, 5, -5), MissCode.RANGE),
        (
            lambda x: x.call(aten.lt.Scalar, 127).call(aten.where.ScalarOther, x, 127),
            MissCode.ARGUMENT,
        ),
    ],
)
def test_refuses_what_is_no_clamp(form: Form, code: MissCode) -> None:
    source = program(form)
    last = next(n for n in reversed(source.graph.nodes) if n.op == "call_function")
    assert refusal(source, SpellSaturation()) == (code, last.name)


@pytest.mark.parametrize(
    "form",
    [
        # One bound; fractions; bounds that are not known, or are those of another value.
        lambda x: x.call(aten.maximum.default, bound(x, -128)),
        lambda x: FORMS["clip"](x, -0.5, 0.5),
        lambda x: FORMS["clip"](x, -128, math.nan),
        lambda x: FORMS["clip"](x, -128, math.inf),
        lambda x: x.call(aten.maximum.default, x * 2).call(aten.minimum.default, bound(x, 127)),
        lambda x: (x * 2).call(aten.gt.Scalar, 127).call(aten.where.ScalarSelf, 127, x),
        lambda x: FORMS["where"](x, 127, -128),
        lambda x: x.call(aten.clamp.default, -128, 127),
        # An activation.
        lambda x: (x * 2).call(aten.hardtanh.default, 0, 6),
        # More elements than there were.
        lambda x: x.call(aten.clamp.Tensor, Term(x.b, x.b.const("many", torch.ones(2, 1, 1)))),
    ],
)
def test_leaves_other_ops(form: Form) -> None:
    assert not apply_rules(program(form), [SpellSaturation(), SpellSaturationAtZero()]).modified


def test_refuses_values_that_are_not_rounded_at_zero() -> None:
    b = GraphBuilder()
    x = Term(b, b.arg("x", torch.float32, 4))
    source = finish(b, FORMS["max, min"](x, 0, 6).node)
    assert not apply_rules(source, [SpellSaturation(), SpellSaturationAtZero()]).modified
