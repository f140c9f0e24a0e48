from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from tests.support.sources.aten_spellings import (
    assert_same_values,
    aten,
    calls,
    finish,
    golden,
)
from torch import nn
from torch.fx import Node

import qfuse
from qfuse.ir.events import MissCode
from qfuse.ir.graph.stage_graph import CapturedGraph
from qfuse.normalize.aten.qdq.clamp_zero_point import ClampZeroPoint
from qfuse.rewrite.driver import apply_rules
from qfuse.rewrite.rule import Miss
from qfuse.targets import Target
from qfuse.testing.build import GraphBuilder


def program_of(  # noqa: PLR0913 - whatever may differ
    dtype: torch.dtype = torch.float32,
    *,
    least: float | None = 1e-8,
    top: float = 255,
    includes: bool = True,
    start: int = 0,
    other: bool = False,
    clamped: bool = False,
    negative: str = "low",
) -> CapturedGraph:
    b = GraphBuilder()
    x = b.arg("x", dtype, "m", 8)
    low = b.call(aten.amin.default, x, [-1], True)
    high = b.call(aten.amax.default, b.arg("y", dtype, "m", 8) if other else x, [-1], True)
    if includes:
        low, high = b.call(aten.clamp.default, low, None, 0), b.call(aten.clamp.default, high, 0)
    scale = b.call(aten.div.Tensor, b.call(aten.sub.Tensor, high, low), top)
    if least is not None:
        scale = b.call(aten.clamp.default, scale, least)
    zero = _zero(b, low, scale, start, negative)
    return finish(b, b.call(aten.clamp.default, zero, 0, 99) if clamped else zero)


def _zero(b: GraphBuilder, low: Node, scale: Node, start: int, negative: str) -> Node:
    if negative == "last":
        zero = b.call(aten.round.default, b.call(aten.div.Tensor, low, scale))
        return b.call(aten.rsub.Scalar, zero, start)
    ratio = b.call(aten.div.Tensor, b.call(aten.neg.default, low), scale)
    zero = b.call(aten.round.default, ratio)
    return b.call(aten.add.Tensor, zero, start) if start else zero


def test_golden_a_zero_point_of_an_interval_with_zero() -> None:
    assert_expected_inline(
        golden(program_of(), ClampZeroPoint()),
        """\
%x: float32[s0, 8]
%0 = aten.amin(%x, (-1), True): float32[s0, 1]
%1 = aten.amax(%x, (-1), True): float32[s0, 1]
%2 = aten.clamp(%0, None, 0): float32[s0, 1]
%3 = aten.clamp(%1, 0): float32[s0, 1]
%4 = aten.sub.Tensor(%3, %2): float32[s0, 1]
%5 = aten.div.Tensor(%4, 255): float32[s0, 1]
%6 = aten.clamp(%5, 1e-08): float32[s0, 1]
%7 = aten.neg(%2): float32[s0, 1]
%8 = aten.div.Tensor(%7, %6): float32[s0, 1]
%9 = aten.round(%8): float32[s0, 1]
%10 = aten.clamp(%9, 0, 255): float32[s0, 1]
return (%10)
fired: clamp-zero-point 1""",
    )


def codes_of(program: CapturedGraph) -> set[MissCode]:
    """Return why the rule matches at none of the nodes."""
    rule = ClampZeroPoint()
    result = apply_rules(program, [rule])
    # What is not a zero point is not reported.
    assert (dict(result.fired), result.misses) == ({}, [])
    found = [rule.match(n) for n in program.graph.nodes if n.target in rule.anchors]
    return {miss.code for miss in found if isinstance(miss, Miss)}


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"dtype": torch.bfloat16}, MissCode.DTYPE),
        ({"includes": False}, MissCode.PATTERN),
        ({"least": None}, MissCode.PATTERN),
        ({"least": 0.0}, MissCode.ARGUMENT),
        ({"top": 254.5}, MissCode.ARGUMENT),
        ({"clamped": True}, MissCode.PATTERN),
    ],
    ids=str,
)
def test_refuses_what_may_be_out_of_range(changes: dict[str, Any], code: MissCode) -> None:
    assert code in codes_of(program_of(**changes))


def test_refuses_a_scale_of_another_interval() -> None:
    assert codes_of(program_of(other=True)) == {MissCode.PATTERN}


@pytest.mark.numeric
@pytest.mark.pairs
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("start", [0, -128])
@pytest.mark.parametrize("negative", ["low", "last"])
@pytest.mark.parametrize("least", [1e-8, 1e-37, 0.5])
def test_no_value_changes(dtype: torch.dtype, start: int, negative: str, least: float) -> None:
    program = program_of(dtype, start=start, negative=negative, least=least)
    x = torch.randn(64, 8, dtype=dtype) * torch.logspace(-38, 30, 64, dtype=dtype)[:, None]
    x[::7] = -x[::7].abs()
    x[::5] = x[::5].abs()
    x[3] = 0.0
    result = assert_same_values(program, [x], ClampZeroPoint())

    assert result.fired == {"clamp-zero-point": 1}
    assert calls(program)[-1] == "aten.clamp"


def test_the_negative_of_an_item_is_no_lowest_value() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, "m", 8)
    part = b.item(b.call(aten.split.Tensor, x, 4, -1), 1)
    scale = b.arg("scale", torch.float32, "m", 1)
    program = finish(b, _zero(b, part, scale, 3, "low"))

    result = apply_rules(program, [ClampZeroPoint()])

    assert result.fired == {}
    assert [event for event in program.log.events if "failed here" in str(event)] == []


class _Unclamped(nn.Module):
    """A linear on activations whose zero point the model does not clamp."""

    w: torch.Tensor

    def __init__(self, bottom: int) -> None:
        super().__init__()
        self.register_buffer("w", torch.randint(-127, 128, (48, 64), dtype=torch.int8))
        self.bottom = bottom

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
        scale = ((high - low) / 255).clamp(min=1e-8)
        zero = torch.round(-low / scale) + self.bottom
        bounds = self.bottom, self.bottom + 255
        q = (torch.round(x / scale) + zero).clamp(*bounds)
        q = q.to(torch.int8 if self.bottom else torch.uint8)
        return F.linear((q.float() - zero) * scale, self.w.float() * 0.01)


@pytest.mark.numeric
@pytest.mark.own_kernels
@pytest.mark.parametrize("bottom", [0, -128])
def test_the_linear_runs_on_the_int8_kernel(bottom: int) -> None:
    model, x = _Unclamped(bottom).eval(), torch.randn(24, 64)
    target = Target.for_testing(isa="avx512_vnni")
    fast = qfuse.compile(model, (x,), options={"backend": "eager"}, check="site", target=target)

    assert [event.kernel for event in fast.report.fused] == ["qfuse.linear_w8a8"]
    assert fast.report.fired["choose-asymmetric"] == 1
    assert fast.report.rolled_back == ()
    torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-3)
