"""Linears on integers in every spelling, through capture and all of normalize."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tests.support.sources.aten_spellings import (
    assert_same_values,
    aten,
    calls,
    codes,
    finish,
    scales,
)
from tests.support.sources.dialects import SEEDS
from tests.support.sources.models import DYNAMIC, K, N, Spelled, captured_each, normalized_graph
from torch.fx import Node

from qfuse.capture import capture
from qfuse.ir.graph.stage_graph import CapturedGraph
from qfuse.normalize import normalize
from qfuse.normalize.aten.rules import rules
from qfuse.testing.build import GraphBuilder
from qfuse.testing.run import run


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize every row of ``x`` by hand."""
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    return (x / scale).round().clamp(-128, 127).to(torch.int8), scale


def integers(m: Spelled, q: torch.Tensor) -> torch.Tensor:
    return torch._int_mm(q.view(-1, K), m.q.t())


def by_rows(m: Spelled, x: torch.Tensor) -> torch.Tensor:
    q, scale = quantized(x)
    return integers(m, q).view(*x.shape[:2], N).float() * scale * m.s + m.b


def by_features_first(m: Spelled, x: torch.Tensor) -> torch.Tensor:
    q, scale = quantized(x)
    y = m.s * integers(m, q).to(torch.float32) * scale.view(-1, 1) + m.b
    return y.view(*x.shape[:2], N)


def by_one_factor(m: Spelled, x: torch.Tensor) -> torch.Tensor:
    q, scale = quantized(x)
    return integers(m, q).view(*x.shape[:2], N) * (scale * m.s) + m.b


def stored_transposed(m: Spelled, x: torch.Tensor) -> torch.Tensor:
    q, scale = quantized(x)
    y = torch._int_mm(q.view(-1, K), m.q_t).view(*x.shape[:2], N)
    return scale * (y.float() * m.s) + m.b


def static(m: Spelled, x: torch.Tensor) -> torch.Tensor:
    q = torch.clamp(torch.round(x / 0.05) + 3, -128, 127).to(torch.int8)
    y = integers(m, q) - 3 * m.q.sum(1)
    return (y.float() * 0.05 * m.s + m.b).view(*x.shape[:2], N)


def static_with_known_sums(m: Spelled, x: torch.Tensor) -> torch.Tensor:
    q = torch.clamp(torch.round(x * 20.0) + 3, -128, 127).to(torch.int8)
    y = integers(m, q) - m.sums * 3
    return (y.float() * (0.05 * m.s) + m.b).view(*x.shape[:2], N)


def emulated(m: Spelled, x: torch.Tensor) -> torch.Tensor:
    q, scale = quantized(x)
    return F.linear(q.float(), m.q.float()) * scale * m.s + m.b


def in_int32(m: Spelled, x: torch.Tensor) -> torch.Tensor:
    q, scale = quantized(x)
    return torch.matmul(q.int(), m.q.int().t()).float() * m.s * scale + m.b


INTEGERS = (
    by_rows,
    by_features_first,
    by_one_factor,
    stored_transposed,
    static,
    static_with_known_sums,
    emulated,
    in_int32,
)


@cache
def captured(shape: tuple[int, int] | None) -> dict[str, CapturedGraph]:
    """The graphs of all spellings; of sizes that vary if there is no shape."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        models = {write.__name__: Spelled(write).eval() for write in INTEGERS}
        x = torch.randn(*(shape or (3, 5)), K)
        return captured_each(models, x, (DYNAMIC,) if shape is None else None)


@pytest.mark.numeric
@pytest.mark.parametrize("write", INTEGERS)
@pytest.mark.parametrize("shape", [(3, 5), (1, 1), None])
def test_every_spelling_of_an_integer_linear_is_one(
    write: Callable[[Spelled, torch.Tensor], torch.Tensor], shape: tuple[int, int] | None
) -> None:
    shapes = [shape] if shape is not None else [(3, 5), (1, 1)]

    normal = normalized_graph(
        captured(shape)[write.__name__], *[torch.randn(*sizes, K) for sizes in shapes]
    )

    names = ("qfuse.quantize", "qfuse.dequantize", "aten.linear")
    found = [c for c in calls(normal) if c not in {"aten.abs", "aten.amax", "aten.div.Tensor"}]
    assert sorted(found) == sorted((*names, names[1]))
    (linear,) = [n for n in normal.graph.nodes if "linear" in str(n.target)]
    assert [len(a.args) for a in linear.args[:2]] == [4, 4]
    assert linear.meta["val"].ndim == 3


@pytest.mark.numeric
@pytest.mark.parametrize("m", [1, 7])
def test_integers_that_are_used_as_they_are_stay_exact(m: int) -> None:
    model = Spelled(lambda s, x: integers(s, x.round().to(torch.int8)) // 3)
    x = torch.randn(1, m, K) * 50
    program = capture(model, (x,))

    normal = normalize(program)

    assert "aten._int_mm" not in calls(normal)
    want = (x.round().to(torch.int8).view(-1, K).long() @ model.q.long().t()) // 3
    assert torch.equal(run(normal, [x])[0].long(), want)


@pytest.mark.property
@given(
    order=st.permutations(["row", "feature", "view", "bias"]),
    sides=st.lists(st.booleans(), min_size=4, max_size=4),
    half=st.sampled_from([None, "row", "feature", "view"]),
    rows=st.sampled_from([(2, 3), (1, 1), (1, 4), (4, 1)]),
    seed=SEEDS,
)
def test_chains_in_any_order_agree(
    order: Sequence[str],
    sides: Sequence[bool],
    half: str | None,
    rows: tuple[int, int],
    seed: int,
) -> None:
    torch.manual_seed(seed)
    chain = Chain(rows)
    for step, left in zip(order, sides, strict=True):
        chain.add(step, left=left)
        if step == half:
            chain.y = chain.b.call(aten._to_copy.default, chain.y, dtype=torch.bfloat16)
    program = finish(chain.b, chain.y)

    assert_same_values(program, [codes(*rows, K), scales(*rows, 1)], *rules())

    # A bias that comes before a scale is scaled too, which no single linear says.
    if order.index("bias") > max(order.index("row"), order.index("feature")):
        assert calls(program).count("aten.linear") == 1
        assert not {"aten.mul.Tensor", "aten.mm"} & set(calls(program))


class Chain:
    """A product of integers of ``q [*rows, K]``, scaled and shifted step by step."""

    def __init__(self, rows: tuple[int, int]) -> None:
        self.b = b = GraphBuilder()
        self.rows = rows
        q = b.arg("q", torch.int8, *rows, K)
        self.scale = b.arg("scale", torch.float32, *rows, 1)
        self.w = b.const("w", codes(N, K))
        x = b.call(aten.view.default, q, (-1, K))
        y = b.call(aten._int_mm.default, x, b.call(aten.t.default, self.w))
        self.y = b.call(aten._to_copy.default, y, dtype=torch.float32)
        self.flat = True

    def add(self, step: str, *, left: bool) -> None:
        """Add one step; ``left`` is the side of the parameter."""
        b = self.b
        match step:
            case "row":
                self._apply(aten.mul.Tensor, self._per_row(self.scale), left=left)
            case "feature":
                self._apply(aten.mul.Tensor, b.const("s", scales(N)), left=left)
            case "view":
                self.y = b.call(aten.view.default, self.y, (*self.rows, N))
                self.flat = False
            case _:
                self._apply(aten.add.Tensor, b.const("bias", torch.randn(N)), left=left)

    def _per_row(self, param: Node) -> Node:
        return self.b.call(aten.view.default, param, (-1, 1)) if self.flat else param

    def _apply(self, op: Any, param: Node, *, left: bool) -> None:
        operands = (param, self.y) if left else (self.y, param)
        self.y = self.b.call(op, *operands)
