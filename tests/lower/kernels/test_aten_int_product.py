from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

import qfuse
from qfuse import kernels
from qfuse.ir.graph.text import to_text
from qfuse.targets import Target

aten = torch.ops.aten

pytestmark = pytest.mark.export

TARGET = Target.for_testing()
LONG = 1056


class Bare(nn.Module):
    """An integer product whose sums are not exact in float32, so that it is not a linear."""

    w: torch.Tensor

    def __init__(self, n: int, k: int) -> None:
        super().__init__()
        self.register_buffer("w", torch.randint(-127, 128, (n, k)).to(torch.int8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch._int_mm(x, self.w.t())


def rows(*shape: int) -> torch.Tensor:
    return torch.randint(-128, 128, shape).to(torch.int8)


@pytest.mark.numeric
@pytest.mark.parametrize("backend", ["eager", pytest.param("auto", marks=pytest.mark.thorough)])
def test_golden_a_bare_product_stays_in_bytes(backend: str) -> None:
    model, x = Bare(8, LONG).eval(), rows(6, LONG)
    fast = qfuse.compile(model, (x,), target=TARGET, options={"backend": backend})
    assert fast.report.kernels == {"aten._int_mm": 1}
    assert_expected_inline(
        to_text(fast.plan.lowered.graph),
        """\
%x: int8[6, 1056]
const %t_folded: int8[1056, 8]
%0 = aten._int_mm(%x, %t_folded): int32[6, 8]
return (%0)""",
    )
    assert torch.equal(fast(x), model(x))
    assert torch.equal(fast(x[:1].expand(6, -1)), model(x[:1].expand(6, -1).contiguous()))


@pytest.mark.numeric
@pytest.mark.parametrize("rows_of_call", [1, 2, 7])
def test_refuses_a_size_that_may_be_one(rows_of_call: int) -> None:
    model = Bare(8, LONG).eval()
    batch = torch.export.Dim("batch", min=1, max=64)
    fast = qfuse.compile(
        model,
        (rows(6, LONG),),
        dynamic_shapes={"x": {0: batch}},
        target=TARGET,
        options={"backend": "eager"},
    )
    (note,) = (note for note in fast.report.notes if "several times slower" in note.text)
    assert "when a size is 1" in note.text
    x = rows(rows_of_call, LONG)
    want = x.to(torch.int32) @ model.w.t().to(torch.int32)
    assert torch.equal(fast(x), want)


@pytest.mark.numeric
def test_a_product_with_scales_is_a_linear() -> None:
    class Scaled(Bare):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch._int_mm(x, self.w.t()).float() * 0.01

    model, x = Scaled(16, 40).eval(), rows(6, 40)
    fast = qfuse.compile(model, (x,), target=TARGET, options={"backend": "eager"})
    best = "qfuse.linear_w8a8" if kernels.load().available else "aten._int_mm"
    assert fast.report.kernels == {best: 1}
    torch.testing.assert_close(fast(x), model(x))
