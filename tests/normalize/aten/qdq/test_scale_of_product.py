from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.sources.aten_spellings import assert_same_values, aten, finish, golden, refusal
from torch.fx import Node

from qfuse.ir.events import MissCode
from qfuse.normalize.aten.qdq.scale_of_product import ScaleOfProduct
from qfuse.testing.build import GraphBuilder


def scaled(b: GraphBuilder, x: Node, top: float = 127.0) -> tuple[Node, Node]:
    peak = b.call(aten.amax.default, b.call(aten.abs.default, x), [-1], True)
    return b.call(aten.div.Tensor, b.call(aten.mul.Tensor, x, top), peak), peak


def test_golden_the_scale_is_shared_with_the_dequantize() -> None:
    b = GraphBuilder()
    y, peak = scaled(b, b.arg("x", torch.float32, "n", 8))
    q = b.call(aten.round.default, b.call(aten.clamp.default, y, -127, 127))
    back = b.call(aten.mul.Tensor, q, b.call(aten.div.Tensor, peak, 127))
    assert_expected_inline(
        golden(finish(b, back), ScaleOfProduct()),
        """\
%x: float32[s0, 8]
%0 = aten.abs(%x): float32[s0, 8]
%1 = aten.amax(%0, (-1), True): float32[s0, 1]
%2 = aten.div.Tensor(%1, 127.0): float32[s0, 1]
%3 = aten.div.Tensor(%x, %2): float32[s0, 8]
%4 = aten.clamp(%3, -127, 127): float32[s0, 8]
%5 = aten.round(%4): float32[s0, 8]
%6 = aten.mul.Tensor(%5, %2): float32[s0, 8]
return (%6)
fired: scale-of-product 1""",
    )


def test_refuses_what_is_not_rounded() -> None:
    b = GraphBuilder()
    y, _ = scaled(b, b.arg("x", torch.float32, 3, 8))
    assert refusal(finish(b, y), ScaleOfProduct())[0] is MissCode.PATTERN


@pytest.mark.numeric
def test_values_agree_up_to_rounding() -> None:
    b = GraphBuilder()
    y, peak = scaled(b, b.arg("x", torch.float32, "n", 8))
    q = b.call(aten.clamp.default, b.call(aten.round.default, y), -127, 127)
    program = finish(b, b.call(aten.mul.Tensor, q, peak))
    values = torch.randint(1, 64, (5, 8)).mul(2).float()
    values[:, 0] = 127
    assert assert_same_values(program, [values], ScaleOfProduct()).fired == {"scale-of-product": 1}
