"""Sums, differences and products of quantized tensors, for backends that claim them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline

from qfuse.ir.errors import NormalizeError
from qfuse.ir.events import MissCode
from qfuse.ir.graph.stage_graph import NormalGraph
from qfuse.ir.graph.text import to_text
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.claimed.elementwise import ElementwiseSpec, as_elementwise
from qfuse.optimize import optimize, rules_for_claims
from qfuse.optimize.claimed.elementwise import FuseElementwise
from qfuse.rewrite.clone import clone
from qfuse.rewrite.driver import apply_rules
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import per_channel, per_tensor
from qfuse.testing.run import random_inputs, run
from qfuse.testing.terms import Term, aten

COLUMNS = 8
Form = Callable[[Term, Term], Term]


def quantized(
    b: GraphBuilder, name: str, *sizes: int | str, float_dtype: torch.dtype = torch.float32
) -> Term:
    """Add an input of quantized values and its dequantize."""
    spec = per_tensor(len(sizes), float_dtype=float_dtype)
    scale = b.const(f"{name}_scale", torch.rand([1] * len(sizes)) * 0.02 + 1e-2)
    zero = b.const(f"{name}_zero", torch.full([1] * len(sizes), 5, dtype=torch.int32))
    return Term(b, b.call(ops.dequantize, b.arg(name, spec.dtype, *sizes), scale, zero, str(spec)))


def source(
    form: Form, *, out: bool = True, other: tuple[int | str, ...] = ("n", COLUMNS)
) -> NormalGraph:
    """Return a graph that computes ``form`` of two dequantized inputs, and quantizes it."""
    b = GraphBuilder()
    y = form(quantized(b, "a", "n", COLUMNS), quantized(b, "b", *other))
    if not out:
        return b.done(y.node)
    spec = per_channel() if len(y.node.meta["val"].shape) == 2 else per_tensor(3)
    spec = spec.with_block((None,) * len(y.node.meta["val"].shape))
    scale = b.const("y_scale", torch.full([1] * len(spec.block), 0.03))
    return b.done(b.call(ops.quantize, y.node, scale, None, str(spec)))


def test_golden() -> None:
    program = source(lambda x, y: x + y, other=("n", COLUMNS))
    result = apply_rules(program, [FuseElementwise()])
    assert result.fired == {"fuse-elementwise": 1}
    assert_expected_inline(
        to_text(program.graph),
        """\
const %a_scale: float32[1, 1]
const %a_zero: int32[1, 1]
%a: int8[s0, 8]
const %b_scale: float32[1, 1]
const %b_zero: int32[1, 1]
%b: int8[s0, 8]
const %y_scale: float32[1, 1]
%0 = qfuse.elementwise(%a, %a_scale, %a_zero, 'int8[-128,127] *x* float32 float32:reciprocal:round-zp int', %b, %b_scale, %b_zero, 'int8[-128,127] *x* float32 float32:reciprocal:round-zp int', %y_scale, None, 'int8[-128,127] *x* float32 float32:reciprocal:round-zp int', 'add', ''): int8[s0, 8]
return (%0)""",
    )


FORMS: dict[str, Form] = {
    "add": lambda x, y: x + y,
    "add, alpha": lambda x, y: Term(x.b, x.b.call(aten.add.Tensor, x.node, y.node, alpha=-0.5)),
    "sub": lambda x, y: x.call(aten.sub.Tensor, y),
    "sub, alpha": lambda x, y: Term(x.b, x.b.call(aten.sub.Tensor, x.node, y.node, alpha=2)),
    "mul": lambda x, y: x * y,
    "square": lambda x, _: x * x,
    "add, relu": lambda x, y: (x + y).call(aten.relu.default),
    "mul, gelu": lambda x, y: (x * y).call(aten.gelu.default),
    "a number": lambda x, _: x + 0.3,
    "a factor": lambda x, _: x * -2,
    "a float": lambda x, _: x + Term(x.b, x.b.const("c", torch.randn(COLUMNS))),
    "a float first": lambda x, _: Term(x.b, x.b.const("c", torch.randn(COLUMNS))) * x,
}


@pytest.mark.numeric
@pytest.mark.parametrize("out", [True, False])
@pytest.mark.parametrize("form", list(FORMS))
def test_values_have_the_same_bits(form: str, out: bool) -> None:
    program = source(FORMS[form], out=out)
    before = clone(program)
    result = apply_rules(program, [FuseElementwise()])
    assert result.fired == {"fuse-elementwise": 1}
    (fused,) = (view for node in program.graph.nodes if (view := as_elementwise(node)))
    assert (fused.out_params is not None) is out
    assert len(fused.epilogue.ops) == ("," in form and "alpha" not in form)
    for rows in (1, 5):
        inputs = random_inputs(before, n=rows)
        (got,), (want,) = run(program, inputs), run(before, inputs)
        assert torch.equal(got, want)


@pytest.mark.numeric
def test_operands_broadcast() -> None:
    program = source(lambda x, y: x * y, other=(3, 1, COLUMNS))
    before = clone(program)
    assert apply_rules(program, [FuseElementwise()]).fired == {"fuse-elementwise": 1}
    inputs = random_inputs(before, n=4)
    assert torch.equal(run(program, inputs)[0], run(before, inputs)[0])


def test_a_result_with_other_users_is_float() -> None:
    b = GraphBuilder()
    y = quantized(b, "a", 3, 4) + quantized(b, "b", 3, 4)
    scale = b.const("y_scale", torch.full((1, 1), 0.03))
    program = b.done(b.call(ops.quantize, y.node, scale, None, str(per_tensor(2))), y.node)
    apply_rules(program, [FuseElementwise()])
    (fused,) = (view for node in program.graph.nodes if (view := as_elementwise(node)))
    assert fused.out_params is None


def test_a_quantize_with_a_scale_of_run_time_stays() -> None:
    b = GraphBuilder()
    y = quantized(b, "a", 3, 4) + quantized(b, "b", 3, 4)
    scale = b.arg("scale", torch.float32, 1, 1)
    program = b.done(b.call(ops.quantize, y.node, scale, None, str(per_tensor(2))))
    apply_rules(program, [FuseElementwise()])
    (fused,) = (view for node in program.graph.nodes if (view := as_elementwise(node)))
    assert fused.out_params is None


@pytest.mark.parametrize(
    ("form", "code"),
    [
        (lambda x, _: Term(x.b, x.b.arg("c", torch.float32, 3)) + 1.0, MissCode.NOT_QUANTIZED),
        (lambda x, _: x * Term(x.b, x.b.const("c", torch.tensor(0.5))), MissCode.DTYPE),
        (
            lambda x, _: x + Term(x.b, x.b.const("c", torch.ones(COLUMNS).double())),
            MissCode.DTYPE,
        ),
    ],
)
def test_refuses(form: Form, code: MissCode) -> None:
    program = source(form, out=False)
    before = to_text(program.graph)
    node = next(n for n in reversed(program.graph.nodes) if n.op == "call_function")
    miss = FuseElementwise().match(node)
    assert not apply_rules(program, [FuseElementwise()]).modified
    assert to_text(program.graph) == before
    assert (miss.code, miss.at.name) in {(code, node.name), (code, "c")}  # type: ignore[union-attr]


def test_only_a_backend_that_claims_it_has_it() -> None:
    program = source(FORMS["add"])
    assert rules_for_claims({ops.linear}) == ()
    plain = optimize(clone(program))
    claimed = optimize(clone(program), added=rules_for_claims({ops.elementwise}))
    found = [[as_elementwise(n) for n in g.graph.nodes] for g in (plain, claimed)]
    assert [sum(view is not None for view in views) for views in found] == [0, 1]


@pytest.mark.parametrize("text", ["add alpha=2.0", "sub", "mul number=-0.5", "add"])
def test_text_is_canonical(text: str) -> None:
    assert str(ElementwiseSpec.parse(text)) == text


@pytest.mark.parametrize("text", ["div", "mul alpha=2.0", "add alpha=x", "add ", ""])
def test_other_text_is_an_error(text: str) -> None:
    with pytest.raises(NormalizeError):
        ElementwiseSpec.parse(text)
