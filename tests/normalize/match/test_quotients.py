from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx import Node

from qfuse.normalize.match.quotients import may_divide_by_zero
from qfuse.testing.build import GraphBuilder

aten = torch.ops.aten


def step_of(b: GraphBuilder, kind: str, high: Node, width: Node) -> Node:
    """A scale, which is the width of an interval over 255 unless the kind says otherwise."""
    step = b.call(aten.div.Tensor, width, 255)
    one = b.const("one", torch.ones(()))
    forms: dict[str, Callable[[], Node]] = {
        "clamped": lambda: b.call(aten.clamp.default, step, 1e-6),
        "clamped at zero": lambda: b.call(aten.clamp.default, step, 0.0),
        "clamped above": lambda: b.call(aten.clamp.default, step, None, 1.0),
        "clamped first": lambda: b.call(
            aten.div.Tensor, b.call(aten.clamp_min.default, width, 1e-6), 255
        ),
        "added": lambda: b.call(aten.add.Tensor, step, 1e-6),
        "replaced": lambda: b.call(aten.where.self, b.call(aten.eq.Scalar, step, 0), one, step),
        "replaced elsewhere": lambda: b.call(
            aten.where.self, b.call(aten.eq.Scalar, high, 0), one, step
        ),
        "constant": lambda: b.const("step", torch.full((3, 1), 0.5)),
        "constant zero": lambda: b.const("step", torch.tensor([[0.5], [0.0], [1.0]])),
        "inverse of a clamp": lambda: b.call(aten.clamp_min.default, step, 1e-6),
    }
    return forms[kind]() if kind in forms else step


def zero_point(b: GraphBuilder, kind: str) -> Node:
    """The rounded quotient of a minimum and a scale."""
    x = b.arg("x", torch.float32, 3, 8)
    low, high = (b.call(op, x, [-1], True) for op in (aten.amin.default, aten.amax.default))
    step = step_of(b, kind, high, b.call(aten.sub.Tensor, high, low))
    if kind.startswith("inverse"):
        ratio = b.call(aten.mul.Tensor, low, b.call(aten.reciprocal.default, step))
    else:
        ratio = b.call(aten.div.Tensor, low, step)
    shifted = b.call(aten.rsub.Scalar, b.call(aten.round.default, ratio), -128)
    return b.call(aten.clamp.default, shifted, -128, 127)


SAFE = ["clamped", "clamped first", "added", "replaced", "constant", "inverse of a clamp"]
UNSAFE = [
    *("plain", "clamped at zero", "clamped above", "replaced elsewhere", "constant zero", "inverse")
]


@pytest.mark.parametrize("kind", SAFE + UNSAFE)
def test_a_divisor_that_may_be_zero(kind: str) -> None:
    assert may_divide_by_zero(zero_point(GraphBuilder(), kind)) == (kind in UNSAFE)


def test_what_is_no_quotient() -> None:
    b = GraphBuilder()
    rounded = b.call(aten.round.default, b.arg("x", torch.float32, 3))
    assert not may_divide_by_zero(rounded)


@pytest.mark.parametrize("least", [1e-8, 1e-4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_least_value_is_one_of_its_dtype(dtype: torch.dtype, least: float) -> None:
    """A bound of 1e-8 is 0 in float16."""
    b = GraphBuilder()
    x = b.arg("x", dtype, 3, 8)
    step = b.call(aten.clamp_min.default, b.arg("width", dtype, 3, 1), least)
    ratio = b.call(aten.round.default, b.call(aten.div.Tensor, x, step))
    assert may_divide_by_zero(ratio) == (dtype is torch.float16 and least == 1e-8)


def test_a_least_value_is_lost_in_a_quotient_and_in_a_cast() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float16, 3, 8)
    width = b.call(aten.clamp_min.default, b.arg("width", torch.float16, 3, 1), 1e-6)
    divided = b.call(aten.div.Tensor, width, 255)
    wide = b.call(aten.clamp_min.default, b.arg("wide", torch.float32, 3, 1), 1e-8)
    narrowed = b.call(aten._to_copy.default, wide, dtype=torch.float16)
    for step, lost in [(width, False), (divided, True), (narrowed, True)]:
        assert may_divide_by_zero(b.call(aten.div.Tensor, x, step)) == lost


def test_what_replaces_zeros() -> None:
    b = GraphBuilder()
    x, scale = b.arg("x", torch.float32, 3, 8), b.arg("scale", torch.float32, 3, 1)
    zero = b.call(aten.eq.Scalar, scale, 0)
    ones = b.call(aten.ones_like.default, scale)
    safe = [
        b.call(aten.where.ScalarSelf, zero, 1, scale),
        b.call(aten.where.self, zero, ones, scale),
        b.call(aten.where.ScalarOther, b.call(aten.gt.Scalar, scale, 0), scale, 1.0),
        b.call(aten.where.self, b.call(aten.ne.Scalar, scale, 0), scale, ones),
        b.call(aten.masked_fill.Scalar, scale, zero, 1.0),
    ]
    unsafe = [
        b.call(aten.where.ScalarSelf, zero, 0, scale),
        b.call(aten.where.ScalarOther, zero, scale, 1.0),
        b.call(aten.where.ScalarSelf, b.call(aten.eq.Scalar, scale, 1), 1, scale),
        b.call(aten.where.ScalarSelf, b.call(aten.gt.Scalar, scale, 0), 1, scale),
        b.call(aten.masked_fill.Scalar, scale, b.call(aten.ne.Scalar, scale, 0), 1.0),
    ]
    for steps, may in ((safe, False), (unsafe, True)):
        for step in steps:
            assert may_divide_by_zero(b.call(aten.div.Tensor, x, step)) == may, step.format_node()
