from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx import Node

from qfuse.ir.ops.views import node_of
from qfuse.normalize.match.signs import is_not_negative
from qfuse.rewrite.prelude import aten
from qfuse.testing.build import GraphBuilder

SIGNS: dict[str, tuple[bool, Callable[[GraphBuilder, Node], Node]]] = {
    "abs": (True, lambda b, x: b.call(aten.abs.default, x)),
    "amax of abs": (
        True,
        lambda b, x: b.call(
            aten.div.Tensor,
            b.call(aten.amax.default, b.call(aten.abs.default, x), [-1], True),
            127.0,
        ),
    ),
    "clamped": (True, lambda b, x: b.call(aten.clamp_min.default, x, 0)),
    "clamped below zero": (False, lambda b, x: b.call(aten.clamp_min.default, x, -1)),
    "clamped twice": (False, lambda b, x: b.call(aten.clamp.default, x, 0, -1)),
    "clamped to a number of run time": (
        False,
        lambda b, x: b.call(
            aten.clamp.default, x, 0, b.call(aten.item.default, b.arg("most", torch.float32))
        ),
    ),
    "exp": (True, lambda b, x: b.call(aten.exp.default, x)),
    "a product": (True, lambda b, x: b.call(aten.mul.Tensor, b.call(aten.sigmoid.default, x), 0.5)),
    "a product with a negative one": (
        False,
        lambda b, x: b.call(aten.mul.Tensor, b.call(aten.sigmoid.default, x), -0.5),
    ),
    "a difference": (
        False,
        lambda b, x: b.call(aten.sub.Tensor, b.call(aten.exp.default, x), 1),
    ),
    "a sum with a negative factor": (
        False,
        lambda b, x: b.call(aten.add.Tensor, b.call(aten.exp.default, x), 1, alpha=-1),
    ),
    "a sum with a positive number": (False, lambda b, x: b.call(aten.add.Tensor, x, 1)),
    "a maximum": (
        True,
        lambda b, x: b.call(aten.maximum.default, x, b.call(aten.exp.default, x)),
    ),
    "an input": (False, lambda _, x: x),
}


@pytest.mark.parametrize("name", SIGNS)
def test_signs(name: str) -> None:
    known, build = SIGNS[name]
    b = GraphBuilder()
    assert is_not_negative(build(b, b.arg("x", torch.float32, 2, 3, 1))) is known


@pytest.mark.parametrize(("value", "known"), [([0.0, 2.0], True), ([1.0, -1.0], False)])
def test_constants(value: list[float], known: bool) -> None:
    b = GraphBuilder()
    assert is_not_negative(b.const("c", torch.tensor(value))) is known
    assert is_not_negative(value[1]) is known


@pytest.mark.parametrize("index", [0, 1])
def test_the_greatest_value_of_an_axis(index: int) -> None:
    b = GraphBuilder()
    x = b.call(aten.abs.default, b.arg("x", torch.float32, 2, 3))
    found = b.item(b.call(aten.max.dim, x, 1, True), index)
    assert is_not_negative(node_of(found)) is (index == 0)
