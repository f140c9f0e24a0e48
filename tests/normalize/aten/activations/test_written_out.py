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
    refusal,
)
from torch.fx import Node

from qfuse.ir.events import MissCode
from qfuse.normalize.aten.activations.written_out import SpellActivation
from qfuse.rewrite.driver import apply_rules
from qfuse.rewrite.rule import Miss
from qfuse.testing.build import GraphBuilder
from qfuse.testing.run import run
from qfuse.testing.terms import Term, linear_result

Form = Callable[[Term], Term]


def sigmoid(x: Term) -> Term:
    return x.call(aten.sigmoid.default)


def below(x: Term) -> Term:
    """1 + exp(-x)."""
    return (-x).call(aten.exp.default) + 1


def clamped(x: Term) -> Term:
    return (x + 3).call(aten.clamp.default, 0, 6)


def erf(x: Term) -> Term:
    return (x / math.sqrt(2.0)).call(aten.erf.default) + 1.0


def tanh(x: Term) -> Term:
    cube = x.call(aten.pow.Tensor_Scalar, 3.0)
    return ((x + cube * 0.044715) * math.sqrt(2.0 / math.pi)).call(aten.tanh.default) + 1.0


def fast_tanh(x: Term) -> Term:
    inner = x * 0.7978845608 * (x * 0.044715 * x + 1.0)
    return inner.call(aten.tanh.default) + 1.0


def multiplied_tanh(x: Term) -> Term:
    return ((x + x * x * x * 0.044715) * 0.79788456).call(aten.tanh.default) + 1


def softplus(x: Term) -> Term:
    return x.call(aten.softplus.default)


def one_plus_exp(x: Term) -> Term:
    return x.call(aten.exp.default) + 1.0


def growth(x: Term) -> Term:
    return x.call(aten.exp.default).call(aten.sub.Tensor, 1)


def signed(x: Term, below: Term, compare: Any = aten.gt.Scalar) -> Term:
    return x.call(compare, 0).call(aten.where.self, x, below)


def turned(x: Term, below: Term, compare: Any = aten.le.Scalar) -> Term:
    return x.call(compare, 0.0).call(aten.where.self, below, x)


def slope(x: Term) -> Term:
    return Term(x.b, x.b.const("slope", torch.full((1,), 0.25, dtype=x.node.meta["val"].dtype)))


FORMS: dict[str, list[Form]] = {
    "sigmoid": [
        lambda x: below(x).call(aten.reciprocal.default) * 1,
        lambda x: ((x * -1).call(aten.exp.default) + 1.0).call(aten.reciprocal.default),
    ],
    "silu": [
        lambda x: x * sigmoid(x),
        lambda x: sigmoid(x) * x,
        lambda x: x / below(x),
        lambda x: x * (below(x).call(aten.reciprocal.default) * 1),
    ],
    "hardsigmoid": [
        lambda x: clamped(x) / 6,
        lambda x: clamped(x) * (1 / 6),
        lambda x: (x + 3.0).call(aten.relu6.default) / 6.0,
        lambda x: (x + 3.0).call(aten.hardtanh.default, 0.0, 6.0) / 6.0,
    ],
    "hardswish": [
        lambda x: x * clamped(x) / 6,
        lambda x: x * (clamped(x) / 6),
        lambda x: clamped(x) * x * 0.16666666666666666,
        lambda x: x / 6 * clamped(x),
        lambda x: x * x.call(aten.hardsigmoid.default),
    ],
    "gelu": [
        lambda x: x * 0.5 * erf(x),
        lambda x: x * erf(x) * 0.5,
        lambda x: x * (erf(x) * 0.5),
        lambda x: x / 2 * erf(x),
        lambda x: erf(x) * x / 2,
        lambda x: x * 0.5 * ((x * 0.70710678118).call(aten.erf.default) + 1),
    ],
    "gelu tanh": [
        lambda x: x * 0.5 * tanh(x),
        lambda x: x * tanh(x) * 0.5,
        lambda x: x * 0.5 * fast_tanh(x),
        lambda x: x * 0.5 * multiplied_tanh(x),
        lambda x: x * 0.5 * (((x + x * 0.044715 * x * x) * 0.79788456).call(aten.tanh.default) + 1),
    ],
    "mish": [
        lambda x: x * softplus(x).call(aten.tanh.default),
        lambda x: softplus(x).call(aten.tanh.default) * x,
        lambda x: x * x.call(aten.exp.default).call(aten.log1p.default).call(aten.tanh.default),
        lambda x: x * one_plus_exp(x).call(aten.log.default).call(aten.tanh.default),
    ],
    "leaky_relu": [
        lambda x: signed(x, x * 0.1),
        lambda x: signed(x, x * slope(x), aten.ge.Scalar),
        lambda x: turned(x, x * -0.5),
        lambda x: turned(x, x * 2, aten.lt.Scalar),
        lambda x: x.call(aten.prelu.default, slope(x)),
    ],
    "elu": [
        lambda x: signed(x, growth(x) * 0.7),
        lambda x: signed(x, growth(x), aten.ge.Scalar),
        lambda x: turned(x, x.call(aten.expm1.default) * 1.5),
        lambda x: signed(x, growth(x.call(aten.clamp_max.default, 0)) * 0.7),
        lambda x: signed(x, x.call(aten.exp.default) + -1.0),
    ],
}
ALL = [(name, i) for name, forms in FORMS.items() for i in range(len(forms))]


def source(form: Form, dtype: torch.dtype = torch.float32) -> tuple[GraphBuilder, Node]:
    b = GraphBuilder()
    return b, form(linear_result(b, dtype)).node


def test_golden_arithmetic_becomes_an_op() -> None:
    assert_expected_inline(
        golden(finish(*source(FORMS["gelu tanh"][0])), SpellActivation()),
        """\
const %w_s: float32[16, 1]
const %w: int8[16, 8]
%0 = qfuse.dequantize(%w, %w_s, None, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): float32[16, 8]
%x: float32[s0, 8]
%1 = aten.linear(%x, %0): float32[s0, 16]
%2 = aten.gelu(%1, approximate='tanh'): float32[s0, 16]
return (%2)
fired: spell-activation 1""",
    )


def test_golden_the_sigmoid_stays_for_its_other_users() -> None:
    b = GraphBuilder()
    x = linear_result(b)
    y = sigmoid(x)

    assert_expected_inline(
        golden(finish(b, (x * y).node, y.node), SpellActivation()),
        """\
const %w_s: float32[16, 1]
const %w: int8[16, 8]
%0 = qfuse.dequantize(%w, %w_s, None, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): float32[16, 8]
%x: float32[s0, 8]
%1 = aten.linear(%x, %0): float32[s0, 16]
%2 = aten.sigmoid(%1): float32[s0, 16]
%3 = aten.silu(%1): float32[s0, 16]
return (%3, %2)
fired: spell-activation 1""",
    )


@pytest.mark.numeric
@pytest.mark.parametrize(("name", "index"), ALL)
def test_values_agree(name: str, index: int) -> None:
    program = finish(*source(FORMS[name][index]))
    result = assert_same_values(program, [torch.randn(33, 8)], SpellActivation())

    assert set(result.fired) == {"spell-activation"}
    assert calls(program)[2:] == [f"aten.{name.removesuffix(' tanh')}"]
    assert ("tanh" in str(program.graph)) == name.endswith("tanh")


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FORMS)
def test_values_agree_in_narrow_types(name: str, dtype: torch.dtype) -> None:
    program = finish(*source(FORMS[name][0], dtype))

    assert assert_same_values(program, [torch.randn(33, 8).to(dtype)], SpellActivation()).fired


def test_constants_may_be_tensors_of_the_dtype() -> None:
    def form(x: Term) -> Term:
        half = Term(x.b, x.b.const("factor", torch.tensor(0.5)))
        root = Term(x.b, x.b.const("root", torch.tensor(2.0).sqrt()))
        return x * half * ((x / root).call(aten.erf.default) + 1)

    assert apply_rules(finish(*source(form)), [SpellActivation()]).fired


@pytest.mark.parametrize(
    "form",
    [
        lambda x: x * 0.5 * ((x / 1.4142).call(aten.erf.default) + 1.0),
        lambda x: x * 0.5 * ((x * 0.7071).call(aten.erf.default) + 1.0),
        lambda x: x * 0.5000001 * erf(x),
        lambda x: x * 0.5 * ((x / 2.0).call(aten.erf.default) + 1.0),
        lambda x: x * ((x + x * x * x * 0.0447) * 0.7978845608).call(aten.tanh.default) * 0.5,
        lambda x: clamped(x) / 6.5,
        lambda x: x / (below(x) + 1),
        lambda x: x * sigmoid(x * 1.702),
        lambda x: x * 0.5 * x.call(aten.add.Tensor, erf(x)),
        lambda x: x * x.call(aten.softplus.default, 2.0).call(aten.tanh.default),
        lambda x: x.call(aten.gt.Scalar, 1).call(aten.where.self, x, x * 0.1),
        lambda x: x.call(aten.gt.Scalar, 0).call(aten.where.self, x * 0.1, x),
        lambda x: x.call(aten.lt.Scalar, 0).call(aten.where.self, x, x * 0.1),
        lambda x: signed(x, x * math.inf),
        lambda x: signed(x, x * math.nan),
        lambda x: signed(x, growth(x) * -math.inf),
        lambda x: signed(x, growth(x + 1)),
        lambda x: signed(x, (x * 2).call(aten.exp.default) + -1.0),
    ],
)
def test_refuses_other_arithmetic(form: Form) -> None:
    program = finish(*source(form))
    found = [SpellActivation().match(n) for n in program.graph.nodes]

    assert refusal(program, SpellActivation())[0] in {MissCode.PATTERN, MissCode.ARGUMENT}
    assert all(isinstance(miss, Miss) and miss.progress == 0 for miss in found)


@pytest.mark.numeric
@pytest.mark.parametrize("name", ["leaky_relu", "elu", "mish"])
def test_what_is_not_finite_stays(name: str) -> None:
    special = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, -80.0, 80.0])
    for form in FORMS[name]:
        program = finish(*source(form))
        apply_rules(program, [SpellActivation()])
        (made,) = [n for n in program.graph.nodes if str(n.target).startswith(f"aten.{name}")]
        b = GraphBuilder()
        x = Term(b, b.arg("x", torch.float32, len(special)))
        (old,) = run(finish(b, form(x).node), [special])

        new = made.target(special, *made.args[1:], **made.kwargs)
        torch.testing.assert_close(new, old, equal_nan=True)


def test_refuses_float_models_and_does_not_report_them() -> None:
    b = GraphBuilder()
    x = Term(
        b,
        b.call(
            aten.linear.default, b.arg("x", torch.float32, 4, 8), b.arg("w", torch.float32, 8, 8)
        ),
    )
    program = finish(b, (x * sigmoid(x)).node)
    miss = SpellActivation().match(list(program.graph.nodes)[-2])

    assert refusal(program, SpellActivation())[0] is MissCode.NOT_QUANTIZED
    assert isinstance(miss, Miss)
    assert miss.progress == 0


def test_refuses_a_constant_that_changes_the_dtype() -> None:
    def form(x: Term) -> Term:
        return x * Term(x.b, x.b.const("factor", torch.full((1, 1), 0.5))) * erf(x)

    b, y = source(form, torch.bfloat16)
    miss = SpellActivation().match(y)

    assert not apply_rules(finish(b, y), [SpellActivation()]).modified
    assert isinstance(miss, Miss)
    assert miss.code is MissCode.DTYPE


def test_the_linear_may_be_behind_other_ops() -> None:
    def form(x: Term) -> Term:
        y = (x * 2).call(aten.view.default, [-1, 4, 4]).call(aten.transpose.int, 1, 2)
        return y * sigmoid(y)

    assert apply_rules(finish(*source(form)), [SpellActivation()]).fired
