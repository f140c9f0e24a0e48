"""The error of long sums counts as noise of the source; a wrong factor does not hide behind it."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Node

from qfuse.ir.events import Exactness
from qfuse.ir.ops import library as ops
from qfuse.rewrite.long_sums import sum_error
from qfuse.rewrite.rewriter import Journal
from qfuse.rewrite.site_check import SiteChecker
from qfuse.rewrite.tolerance import LONG_SUM
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import per_channel

aten = torch.ops.aten
LONG, SHORT = 1 << 15, 512


def sequential(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Add the products one after another in float32."""
    total = torch.zeros(len(x), other.shape[1])
    for k in range(x.shape[1]):
        total += x[:, k, None] * other[k]
    return total


def operands(terms: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Operands of sums of one sign."""
    return torch.rand(5, terms) + 0.1, torch.rand(terms, 3) + 0.1


@pytest.mark.numeric
def test_the_error_of_a_sequential_sum() -> None:
    x, other = operands(LONG)
    truth = x.double() @ other.double()
    apart = sequential(x, other).double() / truth - 1
    found = sum_error(x.double(), other.double(), transposed=False)

    assert found == pytest.approx(float(apart.square().mean().sqrt()), rel=0.5)
    assert sum_error(x.double(), other.t().double(), transposed=True) == found
    batched = sum_error(x[None].double(), other[None].double(), transposed=False)
    assert batched == found


def test_a_limit() -> None:
    x = torch.ones(1, 1 << 13, dtype=torch.float64)
    other = torch.full((1 << 13, 1), 1.0, dtype=torch.float64)
    other[0] = 2.0**25  # all that follows is lost

    assert sum_error(x, other, transposed=False) == LONG_SUM.most
    assert sum_error(x[:, :SHORT], other[:SHORT], transposed=False) == 0
    assert sum_error(x * 0, other, transposed=False) == 0


KINDS = ["linear", "mm", "matmul", "addmm", "fused linear", "fused matmul"]
NONE = (None, None, "")


class Pair:
    """A product, and the same once more times a factor."""

    def __init__(self, kind: str, terms: int, factor: float) -> None:
        self.b = b = GraphBuilder()
        self.x = b.arg("x", torch.float32, 5, terms)
        self.kind, dtype = kind, torch.int8 if kind.startswith("fused") else torch.float32
        self.w = b.const("w", torch.randint(1, 99, (3, terms)).to(dtype))
        self.turned = b.call(aten.t.default, self.w)
        self.scale, self.bias = b.const("s", torch.rand(3, 1)), b.const("bias", torch.zeros(3))
        self.old = self.product()
        self.new = b.call(aten.mul.Tensor, self.product(), factor)

    def product(self) -> Node:
        """Multiply."""
        b, x = self.b, self.x
        if self.kind == "linear":
            return b.call(aten.linear.default, x, self.w)
        if self.kind == "fused linear":
            weight = (self.w, self.scale, None, str(per_channel()))
            return b.call(ops.linear, x, *NONE, *weight, None, *NONE, "", [])
        if self.kind == "fused matmul":
            turned = b.call(aten.t.default, self.scale)
            spec = per_channel().with_block((None, 1))
            return b.call(ops.matmul, x, *NONE, self.turned, turned, None, str(spec), *NONE, "", [])
        if self.kind == "addmm":
            return b.call(aten.addmm.default, self.bias, x, self.turned)
        return b.call(getattr(aten, self.kind).default, x, self.turned)

    def judged(self, x: torch.Tensor) -> str | None:
        """Return what is wrong."""
        journal = Journal()
        journal.replaced.append((self.old, self.new))
        checker = SiteChecker(self.b.done(self.old, self.new), [x])
        return checker.check(journal, Exactness.ROUNDING, "the rewrite")


@pytest.mark.numeric
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("terms", "factor", "ok"),
    [(LONG, 1 + 4e-6, True), (LONG, 1.002, False), (SHORT, 1 + 4e-6, False)],
)
def test_only_what_a_long_sum_explains_passes(
    kind: str, terms: int, factor: float, ok: bool
) -> None:
    found = Pair(kind, terms, factor).judged(torch.rand(5, terms) + 0.1)

    assert (found is None) is ok
    if found is not None:
        assert "times the source's noise" in found


@pytest.mark.numeric
def test_random_signs_explain_less() -> None:
    found = Pair("linear", LONG, 1 + 1e-4).judged(torch.randn(5, LONG))

    assert found is not None
