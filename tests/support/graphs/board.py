"""What the tests of patterns share: a builder with inputs and short names, and ways to ask."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from qfuse.ir.events import MissCode
from qfuse.rewrite.pattern import (
    Arg,
    Match,
    Num,
    Pattern,
    V,
    match,
)
from qfuse.rewrite.rule import Miss
from qfuse.testing.build import GraphBuilder

aten = torch.ops.aten
X, Y, S = V("x"), V("y"), V("s")
Z = Arg("z")
LOW, HIGH = Num("low"), Num("high")
FLOAT, INT8 = torch.float32, torch.int8


class Board:
    """A builder with two float inputs, an int8 one, and short names for the ops that tests use."""

    def __init__(self) -> None:
        self.b = GraphBuilder()
        self.x = self.b.arg("x", FLOAT, 4, 8)
        self.y = self.b.arg("y", FLOAT, 4, 8)
        self.q = self.b.arg("q", INT8, 4, 8)

    def __getattr__(self, name: str) -> Any:
        overload = "Tensor" if name in {"add", "sub", "mul", "div"} else "default"
        target = getattr(getattr(aten, name), overload)
        return lambda *args, **kwargs: self.b.call(target, *args, **kwargs)

    def to(self, node: Node, dtype: torch.dtype) -> Node:
        return self.b.call(aten._to_copy.default, node, dtype=dtype)


def hit(pattern: Pattern, node: Node) -> Match:
    found = match(pattern, node)
    assert isinstance(found, Match), found
    return found


def miss(pattern: Pattern, node: Node) -> Miss:
    found = match(pattern, node)
    assert isinstance(found, Miss), found
    return found


def told(pattern: Pattern, node: Node) -> tuple[MissCode, str, str]:
    found = miss(pattern, node)
    return found.code, found.at.name, found.reason
