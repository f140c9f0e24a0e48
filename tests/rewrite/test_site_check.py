"""One rewrite, judged by the values of its region."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from qfuse.ir.events import Exactness
from qfuse.ir.ops import library as ops
from qfuse.rewrite.rewriter import Journal
from qfuse.rewrite.site_check import SiteChecker
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import per_tensor

aten = torch.ops.aten


@pytest.mark.numeric
@pytest.mark.parametrize(("factor", "wrong"), [(1 - 1e-6, ""), (1.0, ""), (0.9, "steps apart")])
def test_a_float_that_was_rounded_last_may_be_a_step_off(factor: float, wrong: str) -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 40, 50)
    spec = replace(per_tensor(2), dtype=torch.uint8, quant_min=0, quant_max=255)
    scale = b.const("scale", torch.full((1, 1), 0.25))

    def rounded(y: torch.fx.Node) -> torch.fx.Node:
        args = (y, None, None, "", f"round(0,-,{spec})", [scale], None, None, "", "", "")
        return b.item(b.call(ops.activation, *args), 0)

    old, new = rounded(x), rounded(b.call(aten.mul.Tensor, x, factor))
    program = b.done(old, new)
    values = torch.randint(1, 200, (40, 50)) * 0.25 + 0.05
    values[3, 7] = 2.625 + 5e-7  # beside a tie: 10.5 steps
    checker = SiteChecker(program, [values])
    journal = Journal()
    journal.replaced.append((old, new))

    found = checker.check(journal, Exactness.ROUNDING, "the rewrite")
    assert wrong in (found or "")
    assert (found is None) is (not wrong)
