"""Typed views: they read what the call says, give it back, and see nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.fx import Node

from qfuse.ir.ops import library as ops
from qfuse.ir.ops.activation import Activation
from qfuse.ir.ops.epilogue import Epilogue
from qfuse.ir.ops.linear import as_fused_linear, as_linear
from qfuse.ir.ops.output import Output
from qfuse.ir.ops.qdq import as_choose, as_dequantize, as_quantize, as_requantize
from qfuse.ir.ops.views import (
    QuantParams,
    bits_equal,
    bytes_of,
    dtype_of,
    node_of,
    optional_node,
    shape_of,
    tensor_of,
)
from qfuse.ir.quant.choose import ChooseSpec, Formula
from qfuse.ir.quant.spec import QuantSpec
from qfuse.testing.build import GraphBuilder

aten = torch.ops.aten
SPEC = QuantSpec(torch.int8, -128, 127, (None, None))
CHOOSE = ChooseSpec(Formula.AO_ASYMMETRIC, torch.int8, -128, 127, (1, None), 1e-5)
VIEWS = {
    "quantize": as_quantize,
    "dequantize": as_dequantize,
    "requantize": as_requantize,
    "choose": as_choose,
    "linear": as_linear,
    "fused": as_fused_linear,
}


class Calls:
    """One call of each op that has a view."""

    def __init__(self) -> None:
        self.b = GraphBuilder()
        self.x = self.b.arg("x", torch.float32, 4, 6)
        self.q = self.b.arg("q", torch.int8, 4, 6)
        self.w = self.b.const("w", torch.ones(3, 6))
        self.w_q = self.b.const("w_q", torch.ones(3, 6, dtype=torch.int8))
        self.bias = self.b.const("bias", torch.ones(3))
        self.scale = self.b.const("scale", torch.tensor([[0.1]]))
        self.zero = self.b.const("zero", torch.tensor([[3]], dtype=torch.int32))
        self.params = QuantParams(SPEC, self.scale, self.zero)

    def make(self, name: str) -> Any:
        """The call of which ``VIEWS[name]`` is the view."""
        b, edge = self.b, (self.scale, self.zero, str(SPEC))
        match name:
            case "quantize":
                return b.call(ops.quantize, self.x, *edge)
            case "dequantize":
                return b.call(ops.dequantize, self.q, *edge)
            case "requantize":
                return b.call(ops.requantize, self.q, *edge, *edge)
            case "choose":
                return b.call(ops.choose_qparams, self.x, str(CHOOSE))
            case "linear":
                return b.call(aten.linear.default, self.x, self.w, self.bias)
            case _:
                args: Any = (
                    self.q,
                    *edge,
                    self.w_q,
                    *edge,
                    self.bias,
                    None,
                    None,
                    "",
                    "act(relu)",
                    [],
                )
                return b.call(ops.linear, *args)


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("other", VIEWS)
def test_a_view_sees_its_op_alone(name: str, other: str) -> None:
    node = Calls().make(other)

    assert (VIEWS[name](node) is not None) is (name == other)


@pytest.mark.parametrize("value", [None, 3, "qfuse.quantize", [1]], ids=str)
def test_what_is_no_node_has_no_view(value: object) -> None:
    assert [view(value) for view in VIEWS.values()] == [None] * len(VIEWS)


@pytest.mark.parametrize("name", ["quantize", "dequantize"])
def test_the_parameters_of_an_edge(name: str) -> None:
    calls = Calls()
    node = calls.make(name)
    view: Any = VIEWS[name](node)
    value = calls.x if name == "quantize" else calls.q

    assert view.node is node
    assert view.params == calls.params
    assert (view.x if name == "quantize" else view.q) is value
    assert view.params.call_args(value) == node.args
    assert view.params.tensors == (calls.scale, calls.zero)


@pytest.mark.parametrize("name", ["requantize", "fused"])
def test_a_view_gives_its_arguments_back(name: str) -> None:
    node = Calls().make(name)
    view: Any = VIEWS[name](node)

    assert view.call_args() == node.args


def test_keywords_and_defaults_are_arguments_too() -> None:
    calls = Calls()
    bare = calls.b.call(aten.linear.default, calls.x, calls.w)
    named = calls.b.call(aten.linear.default, calls.x, calls.w, bias=calls.bias)

    for node, bias in ((bare, None), (named, calls.bias)):
        view = as_linear(node)
        assert view is not None
        assert (view.x, view.weight, view.bias) == (calls.x, calls.w, bias)


def test_a_choice_has_its_spec() -> None:
    calls = Calls()
    view = as_choose(calls.make("choose"))

    assert view is not None
    assert (view.x, view.spec, view.outer_scale) == (calls.x, CHOOSE, None)


def test_a_fused_linear_has_float_and_quantized_edges() -> None:
    calls = Calls()
    view = as_fused_linear(calls.make("fused"))
    assert view is not None
    assert (view.x_params, view.weight_params, view.out_params) == (
        calls.params,
        calls.params,
        None,
    )
    assert str(view.epilogue) == "act(relu)"
    assert view.float_dtype is torch.float32

    args = replace(view, x=calls.x, x_params=None).call_args()
    real = as_fused_linear(calls.b.call(ops.linear, *args))
    assert real is not None
    assert (real.x_params, real.float_dtype) == (None, torch.float32)


def test_the_second_level_of_scales_comes_last_and_only_if_there_is_one() -> None:
    calls = Calls()
    outer = calls.b.const("outer", torch.ones(1, 1))
    two = replace(calls.params, outer_scale=outer)

    assert calls.params.call_args(calls.x) == (calls.x, calls.scale, calls.zero, str(SPEC))
    assert two.call_args(calls.x) == (*calls.params.call_args(calls.x), outer)
    assert two.tensors == (calls.scale, calls.zero, outer)
    with pytest.raises(AssertionError, match="one level of scales"):
        activation_of(calls.x, two).call_args()


def activation_of(x: Node, params: QuantParams | None) -> Activation:
    return Activation(x, x, params, Epilogue.parse("act(relu)"), (), Output())


def test_a_float_operand_has_null_parameters() -> None:
    calls = Calls()
    assert activation_of(calls.x, None).call_args()[:4] == (calls.x, None, None, "")


class TestSameParameters:
    def params(self, scale: torch.Tensor, zero: torch.Tensor | None = None) -> QuantParams:
        b = GraphBuilder()
        node = None if zero is None else b.const("zero", zero)
        return QuantParams(SPEC, b.const("scale", scale), node)

    def test_equal_bits_are_equal(self) -> None:
        zero = torch.tensor([[3]])
        one = self.params(torch.tensor([[0.1]]), zero)

        assert one.same_as(one)
        assert one.same_as(self.params(torch.tensor([[0.1]]), zero.clone()))

    @pytest.mark.parametrize(
        "other",
        [
            torch.tensor([[0.1]], dtype=torch.float64),
            torch.tensor([[0.1]]) * (1 + 1e-6),
            torch.tensor([0.1]),
            torch.empty(1, 1, device="meta"),
        ],
        ids=["another type", "another value", "another shape", "no value"],
    )
    def test_other_scales_are_others(self, other: torch.Tensor) -> None:
        assert not self.params(torch.tensor([[0.1]])).same_as(self.params(other))

    def test_other_specs_and_a_missing_zero_point_are_others(self) -> None:
        one = self.params(torch.tensor([[0.1]]), torch.tensor([[0]]))

        assert not one.same_as(replace(one, spec=replace(SPEC, quant_min=-127)))
        assert not one.same_as(replace(one, zero_point=None))

    def test_a_value_that_is_computed_is_equal_to_itself_alone(self) -> None:
        b = GraphBuilder()
        peaks = [b.call(aten.neg.default, b.arg(n, torch.float32, 1, 1)) for n in "ab"]
        one, two = (QuantParams(SPEC, peak, None) for peak in peaks)

        assert one.same_as(QuantParams(SPEC, peaks[0], None))
        assert not one.same_as(two)


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (torch.tensor(0.0), torch.tensor(-0.0), False),
        (torch.tensor([torch.nan]), torch.tensor([torch.nan]), True),
        (torch.arange(4.0).view(2, 2).t(), torch.tensor([[0.0, 2.0], [1.0, 3.0]]), True),
        (torch.zeros(1).as_strided((1,), (0,)), torch.zeros(1), True),
        (torch.tensor([1.0]), torch.tensor([1.0 + 1e-7]), False),
    ],
    ids=["signed zeros", "nan", "strides", "a stride of zero", "one ulp"],
)
def test_bits(a: torch.Tensor, b: torch.Tensor, same: bool) -> None:
    assert bits_equal(a, b) is same
    assert (bytes_of(a) == bytes_of(b)) is same


def test_what_has_no_values_is_equal_to_itself_alone() -> None:
    a, b = torch.empty(2, device="meta"), torch.empty(2, device="meta")

    assert bits_equal(a, a)
    assert not bits_equal(a, b)


def test_shape_and_type_are_those_of_the_value() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.bfloat16, "m", 6)

    assert tensor_of(x) is x.meta["val"]
    assert (dtype_of(x), shape_of(x)[1]) == (torch.bfloat16, 6)
    assert isinstance(shape_of(x)[0], torch.SymInt)
    parts = b.call(aten.split.Tensor, b.arg("y", torch.float32, 4), 2)
    with pytest.raises(AssertionError, match="is not a tensor"):
        tensor_of(parts)


def test_arguments_that_must_be_nodes() -> None:
    node = Calls().x

    assert (node_of(node), optional_node(node), optional_node(None)) == (node, node, None)
    with pytest.raises(AssertionError, match="not a node: 3"):
        node_of(3)
