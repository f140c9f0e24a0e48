"""An op from its declaration alone: a new one, in a namespace of its own, as an example."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from tests.support.values import bits_same
from torch.fx import Node

from qfuse.ir.ops.check import problems_of
from qfuse.ir.ops.declare import Op, define_op
from qfuse.ir.ops.epilogue import Act, Cast, Epilogue, Round
from qfuse.ir.ops.fields import field_of
from qfuse.ir.ops.linear import FusedLinear
from qfuse.ir.ops.output import ExtraOutput, Output
from qfuse.ir.ops.views import QuantParams, tensor_of
from qfuse.ir.quant.choose import ChooseSpec, Formula, choose_qparams
from qfuse.ir.quant.reference import dequantize, quantize
from qfuse.ir.quant.spec import QuantSpec
from qfuse.testing.build import GraphBuilder

F32 = torch.float32
SPEC = QuantSpec(torch.int8, -128, 127, (None, None))
CHOOSE = ChooseSpec(Formula.AO_SYMMETRIC, torch.int8, -128, 127, (1, None), 1e-5, F32, torch.int8)


@define_op("add", namespace="qfuse_test")
@dataclass(frozen=True, slots=True)
class Add(Op):
    """The sum of two tensors, each of which may be quantized, and so may the result be."""

    x: Node
    x_params: QuantParams | None
    y: Node
    y_params: QuantParams | None
    alpha: float
    epilogue: Epilogue
    extras: tuple[Node, ...]
    out_params: QuantParams | None
    offset: Node | None = None

    @staticmethod
    def reference(
        x: torch.Tensor,
        y: torch.Tensor,
        alpha: float,
        epilogue: Epilogue,
        extras: Sequence[torch.Tensor],
        offset: torch.Tensor | None,
    ) -> torch.Tensor:
        """Add."""
        total = torch.add(x, y, alpha=alpha)
        return epilogue.apply(total if offset is None else total + offset, extras)


@define_op("square", namespace="qfuse_test")
@dataclass(frozen=True, slots=True)
class Square(Op):
    """An op of several results."""

    x: Node
    output: Output

    @staticmethod
    def reference(x: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Multiply by itself."""
        return x * x, None


def test_the_schema() -> None:
    assert str(Add.overload._schema) == (
        "qfuse_test::add(Tensor x, Tensor? x_scale, Tensor? x_zero_point, str x_spec, Tensor y, "
        "Tensor? y_scale, Tensor? y_zero_point, str y_spec, float alpha, str epilogue, "
        "Tensor[] extras, Tensor? out_scale, Tensor? out_zero_point, str out_spec, "
        "Tensor? x_outer_scale=None, Tensor? y_outer_scale=None, Tensor? out_outer_scale=None, "
        "Tensor? offset=None) -> Tensor"
    )
    assert str(Square.overload._schema) == (
        "qfuse_test::square(Tensor x, Tensor? out_scale, Tensor? out_zero_point, str out_spec, "
        "str choose, str keep) -> Tensor[]"
    )


def built(offset: bool = False, spec: QuantSpec = SPEC) -> tuple[GraphBuilder, Add]:
    """A quantized and a float operand, a step, and a quantized result."""
    b = GraphBuilder()
    q, y = b.arg("q", torch.int8, "m", 8), b.arg("y", F32, "m", 8)
    params = QuantParams(spec, b.const("scale", torch.full((1, 1), 0.03)), None)
    zero = b.const("offset", torch.randn(8)) if offset else None
    op = Add(q, q, params, y, None, 2.0, Epilogue((Act("relu"),)), (), params, zero)
    return b, op


@pytest.mark.parametrize("offset", [False, True])
def test_a_view_and_its_arguments(offset: bool) -> None:
    b, op = built(offset)
    node = b.call(op.overload, *op.call_args())
    assert len(node.args) == (18 if offset else 14)
    view = Add.of(node)
    assert view == replace(op, node=node)
    assert view is not None
    assert view.call_args() == node.args
    assert Square.of(node) is None
    assert Add.of(op.x) is None
    assert view.result_params == view.x_params
    assert view.result_spec == SPEC
    params = view.result_params
    assert params is not None
    assert view.with_result_params(params) == view


def test_the_reference_quantizes_what_the_declaration_says() -> None:
    b, op = built(offset=True)
    node = b.call(op.overload, *op.call_args())
    fake = tensor_of(node)
    assert (fake.dtype, fake.dim()) == (torch.int8, 2)
    q = torch.randint(-128, 128, (3, 8), dtype=torch.int8)
    y, offset, scale = torch.randn(3, 8), torch.randn(8), torch.full((1, 1), 0.03)
    values: dict[Any, torch.Tensor] = {op.x: q, op.y: y, op.offset: offset}
    args = torch.fx.node.map_arg(op.call_args(), lambda n: values.get(n, scale))
    total = torch.add(dequantize(q, scale, None, SPEC), y, alpha=2.0) + offset
    want = quantize(total.relu(), scale, None, SPEC)
    assert bits_same((op.overload(*args),), (want,))
    wide = Add.widened_args(args, {})
    assert wide[3] == str(SPEC.widened())


def test_an_op_of_several_results() -> None:
    b = GraphBuilder()
    x = b.arg("x", F32, "m", 8)
    block = Output(None, (SPEC.with_block((1, None)), CHOOSE), frozenset({ExtraOutput.FLOAT}))
    node = b.call(Square.overload, *Square(x, x, block).call_args())
    view = Square.of(node)
    assert view is not None
    assert view.output == block
    assert not list(problems_of(view))
    value = torch.randn(3, 8)
    y = value * value
    scale, zero_point = choose_qparams(y, CHOOSE)
    want = quantize(y, scale, None, SPEC.with_block((1, None))), scale, zero_point, y
    assert bits_same(tuple(Square.overload(value, *view.call_args()[1:])), want)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, ""),
        ({"epilogue": Epilogue((Cast(torch.bfloat16),))}, "float values are torch.bfloat16"),
        ({"y_params": "x"}, "quantized values are torch.float32"),
        ({"out_params": None}, ""),
        (
            {"epilogue": Epilogue((Round(0, None, replace(SPEC, float_dtype=torch.float16)),))},
            "float values",
        ),
    ],
)
def test_a_call_is_verified(change: dict[str, Any], why: str) -> None:
    b, op = built()
    node = b.call(op.overload, *op.call_args())
    if change.get("y_params") == "x":
        change = {"y_params": op.x_params}
    if change.get("out_params", op) is None:
        node = b.call(op.overload, *replace(op, out_params=None).call_args())
    op = replace(op, node=node, **change)
    assert next(problems_of(op), "").startswith(why)
    assert bool(list(problems_of(op))) is bool(why)


def test_refuses_an_operand_of_another_block() -> None:
    b, op = built()
    node = b.call(op.overload, *op.call_args())
    wrong = QuantParams(SPEC.with_block((1, None)), b.const("many", torch.ones(3, 1)), None)
    (problem, *_) = problems_of(replace(op, node=node, x_params=wrong))
    assert "scale of shape" in problem


def test_refuses_a_declaration_that_is_none() -> None:
    with pytest.raises(TypeError, match="no argument of an op"):
        field_of("x", dict[str, int], late=False)
    with pytest.raises(TypeError, match="no argument of an op"):
        field_of("x", tuple[str, ...], late=False)

    @dataclass(frozen=True, slots=True)
    class Deaf(Op):
        x: Node
        y: Node

        @staticmethod
        def reference(x: torch.Tensor) -> torch.Tensor:
            return x

    with pytest.raises(TypeError, match="does not take x, y"):
        define_op("deaf", namespace="qfuse_test")(Deaf)


def test_another_reference_may_compute_an_op() -> None:
    x, weight = torch.randn(2, 8), torch.randn(4, 8)
    args: tuple[Any, ...] = (
        x,
        None,
        None,
        "",
        weight,
        None,
        None,
        "",
        None,
        None,
        None,
        "",
        "act(relu)",
        [],
    )
    got = FusedLinear.compute(lambda x, *others: others[-2].apply(x, others[-1]), *args)
    assert bits_same((got,), (x.relu(),))
