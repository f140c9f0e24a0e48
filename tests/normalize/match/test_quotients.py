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
