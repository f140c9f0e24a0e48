"""What is captured, and of what kind it is."""

from __future__ import annotations

import torch
from tests.support.graphs.board import (
    FLOAT,
    HIGH,
    INT8,
    LOW,
    Board,
    X,
    Z,
    aten,
    hit,
    miss,
    told,
)

from qfuse.ir.dtypes import COMPUTE_DTYPES
from qfuse.ir.events import MissCode
from qfuse.ir.ops.linear import as_linear
from qfuse.ir.ops.views import dtype_of
from qfuse.rewrite.pattern import ANY, CAST, Const, Operand, Read, Scalar, V, cast, op, through


def test_a_name_is_one_value(on: Board) -> None:
    square = X * X
    hit(square, on.mul(on.x, on.x))
    assert (
        told(square, on.mul(on.x, on.y))[2]
        == "expected the same value for x, found another placeholder"
    )
    found = hit(op(aten.mul.Tensor, ANY, ANY), on.mul(on.x, on.y))
    assert found.bound == {}


def test_two_reads_of_one_constant_are_one_value(on: Board) -> None:
    value = torch.ones(8)
    one, again, other = on.b.const("w", value), on.b.const("w", value), on.b.const("v", value)
    assert hit(X * X, on.mul(one, again))[X] is one
    miss(X * X, on.mul(one, other))


def test_captures_are_typed(on: Board) -> None:
    real = V("r", COMPUTE_DTYPES)
    hit(op(aten.abs.default, real), on.abs(on.x))
    at = on.abs(on.q)
    assert told(op(aten.abs.default, real), at)[:2] == (MissCode.DTYPE, "q")
    assert told(op(aten.abs.default, V("r", FLOAT)), at)[2] == "expected float32 for r, found int8"
    assert told(op(aten.abs.default, V("r", rank=1)), at)[2] == "expected 1 axes, found 2"
    assert told(X * V("s", FLOAT), on.mul(on.x, 2))[0] is MissCode.DTYPE
    assert told(op(aten.abs.default, X).giving(FLOAT), at)[:2] == (MissCode.DTYPE, at.name)


def test_numbers_and_constants(on: Board) -> None:
    clamp = op(aten.clamp.default, X, LOW, HIGH)
    found = hit(clamp, on.clamp(on.x, -1, 2.5))
    assert (found[LOW], found[HIGH]) == (-1, 2.5)
    assert told(clamp, on.clamp(on.x, -1))[:2] == (MissCode.NOT_CONSTANT, "clamp_default_1")
    scale = on.b.const("scale", torch.tensor([2.0]))
    half = on.reciprocal(scale)
    known = hit(X * Const("c"), on.mul(on.x, half))[Const("c")]
    assert (known.node, known.value.item()) == (half, 0.5)
    assert told(X * Const("c"), on.mul(on.x, on.y))[0] is MissCode.NOT_CONSTANT
    assert hit(X * Scalar("e"), on.mul(half, on.x))[Scalar("e")] == 0.5
    assert hit(X * Scalar("e"), on.mul(on.x, 3))[Scalar("e")] == 3
    assert hit(X + Z, on.add(on.x, 3))[Z] == 3


def test_operands_are_tensors_or_numbers(on: Board) -> None:
    size = on.b.call(aten.sym_size.int, on.b.arg("d", FLOAT, "m", 8), 0)
    product = X * Operand("s")
    for value in (on.y, 2, 0.5):
        assert hit(product, on.mul(on.x, value))[Operand("s")] == value
    wrong = on.mul(on.x, 2)
    for value in (size, True):
        wrong.args = (on.x, value)
        assert told(product, wrong)[0] is MissCode.DTYPE
        assert told(through(cast(X), CAST) * X, wrong)[0] is MissCode.PATTERN


def test_typed_views(on: Board) -> None:
    linear = Read("linear", as_linear)
    weight = on.b.const("w", torch.ones(8, 8))
    node = on.linear(on.x, weight)
    assert hit(linear + X, on.add(on.x, node))[linear].weight is weight
    assert told(linear + X, on.add(on.x, on.y))[2] == "expected a linear, found placeholder"


def test_a_typed_view_is_not_asked_about_sizes(on: Board) -> None:
    size = on.b.call(aten.sym_size.int, on.b.arg("d", FLOAT, "m", 8), 0)
    integers = Read("integers", lambda node: node if dtype_of(node) is INT8 else None)
    product = on.mul(on.x, 2)
    product.args = (on.x, size)
    wanted = "found aten.sym_size.int, a number that is computed at run time"
    assert wanted in told(op(aten.mul.Tensor, X, integers), product)[2]


def test_the_sentence_of_a_part_can_be_its_own(on: Board) -> None:
    clamp = op(aten.clamp.default, X, LOW, HIGH)
    text = "{found} leaves the range open"
    pattern = cast(clamp.otherwise(MissCode.RANGE, text), INT8)
    at = on.to(on.neg(on.x), INT8)
    assert told(pattern, at) == (MissCode.RANGE, "neg_default", "aten.neg leaves the range open")
