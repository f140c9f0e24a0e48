from __future__ import annotations

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
from torch.fx.node import Argument

from qfuse.capture import capture
from qfuse.ir.events import MissCode
from qfuse.normalize import normalize
from qfuse.normalize.aten.spell_alias import ALIASES, SpellAlias
from qfuse.rewrite.prelude import OpOverload
from qfuse.testing.build import GraphBuilder
from qfuse.testing.run import random_inputs

RULE = SpellAlias()


def arguments_of(b: GraphBuilder, op: OpOverload, x: Node) -> tuple[Argument, ...]:
    """Return arguments that an op takes."""
    y = b.arg("y", torch.float32, 8, 8)
    match len([a for a in op._schema.arguments if not a.has_default_value()]):
        case 1 if op is aten.row_stack.default:
            return ([x, y],)
        case 1:
            return (x,)
        case 2 if op is aten.special_softmax.default:
            return (x, -1)
        case _:
            return (x, y)


def test_golden() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 8, 8)
    y = b.call(aten.subtract.Tensor, b.call(aten.multiply.Tensor, x, 2.0), x, alpha=3)
    y = b.call(aten.divide.Tensor_mode, y, 4.0, rounding_mode="floor")
    assert_expected_inline(
        golden(finish(b, y), RULE),
        """\
%x: float32[8, 8]
%0 = aten.mul.Tensor(%x, 2.0): float32[8, 8]
%1 = aten.sub.Tensor(%0, %x, alpha=3): float32[8, 8]
%2 = aten.div.Tensor_mode(%1, 4.0, rounding_mode='floor'): float32[8, 8]
return (%2)
fired: spell-alias 3""",
    )


@pytest.mark.numeric
@pytest.mark.parametrize("op", ALIASES, ids=str)
def test_values_are_the_same_bits(op: OpOverload) -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 8, 8)
    more = {"rounding_mode": "trunc"} if op is aten.divide.Tensor_mode else {}
    program = finish(b, b.call(op, *arguments_of(b, op, x), **more))
    inputs = random_inputs(program)

    assert assert_same_values(program, inputs, RULE, exact=True).fired


@pytest.mark.numeric
def test_quantization_in_other_names() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("w", torch.randint(-128, 128, (6, 8), dtype=torch.int8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = torch.clip(torch.round(torch.divide(x, 0.05)), -128, 127).to(torch.int8)
            w = torch.subtract(self.get_buffer("w").float(), 3)
            return torch.multiply(q.float(), 0.05) @ torch.true_divide(w, 8.0).t()

    program = normalize(capture(Model(), (torch.randn(3, 8),)))
    assert calls(program) == [
        "qfuse.quantize",
        "qfuse.dequantize",
        "qfuse.dequantize",
        "aten.linear",
    ]


def test_refuses_to_round_to_decimals() -> None:
    b = GraphBuilder()
    y = b.call(aten.special_round.default, b.arg("x", torch.float32, 8, 8), decimals=2)
    assert refusal(finish(b, y), RULE) == (MissCode.ARGUMENT, "special_round_default")
