from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.sources.aten_spellings import (
    assert_same_values,
    aten,
    codes,
    finish,
    golden,
    refusal,
)
from torch import nn

import qfuse
from qfuse.ir.events import MissCode
from qfuse.ir.graph.stage_graph import CapturedGraph
from qfuse.normalize.aten.int_matmul.expand_addmm import ExpandIntAddmm
from qfuse.targets import Target
from qfuse.testing.build import GraphBuilder

K, N = 12, 5


def program_of(dtype: torch.dtype, shape: tuple[int, ...] = (N,), **factors: int) -> CapturedGraph:
    b = GraphBuilder()
    x, y = b.arg("x", dtype, 3, K), b.arg("y", dtype, *shape)
    return finish(
        b, b.call(aten.addmm.default, y, x, b.const("w", codes(K, N).to(dtype)), **factors)
    )


def test_golden_a_product_and_a_sum() -> None:
    assert_expected_inline(
        golden(program_of(torch.int32, beta=3), ExpandIntAddmm()),
        """\
%x: int32[3, 12]
%y: int32[5]
const %w: int32[12, 5]
%0 = aten.mm(%x, %w): int32[3, 5]
%1 = aten.mul.Tensor(%y, 3): int32[5]
%2 = aten.add.Tensor(%0, %1): int32[3, 5]
return (%2)
fired: expand-int-addmm 1""",
    )


def test_refuses_floats() -> None:
    program = program_of(torch.float32)
    assert refusal(program, ExpandIntAddmm()) == (MissCode.DTYPE, "addmm_default")


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("alpha", "beta"), [(1, 1), (-3, 2), (0, 1), (2, 0), (2**30, -1)])
@pytest.mark.parametrize("shape", [(N,), (3, N), (3, 1)])
def test_integers_are_the_same(
    dtype: torch.dtype, alpha: int, beta: int, shape: tuple[int, ...]
) -> None:
    program = program_of(dtype, shape, alpha=alpha, beta=beta)
    inputs = [codes(3, K).to(dtype), torch.randint(-(2**31), 2**31, shape).to(dtype)]
    assert assert_same_values(program, inputs, ExpandIntAddmm(), exact=True).fired


class _Integers(nn.Module):
    """A product of integers with a summand in integers."""

    w: torch.Tensor
    y: torch.Tensor

    def __init__(self, k: int, alpha: int) -> None:
        super().__init__()
        self.register_buffer("w", torch.randint(-127, 128, (48, k), dtype=torch.int8))
        self.register_buffer("y", torch.randint(-(2**31), 2**31, (48,)).to(torch.int32))
        self.alpha = alpha

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.y, x.int(), self.w.t().int(), alpha=self.alpha)


@pytest.mark.numeric
@pytest.mark.own_kernels
@pytest.mark.parametrize(("k", "kernel"), [(64, "qfuse.linear_w8a8"), (2048, "aten._int_mm")])
@pytest.mark.parametrize("alpha", [1, -3])
def test_integers_run_on_an_int8_kernel(k: int, kernel: str, alpha: int) -> None:
    model = _Integers(k, alpha).eval()
    x = torch.randint(-128, 128, (24, k), dtype=torch.int8)
    target = Target.for_testing(isa="avx512_vnni")
    fast = qfuse.compile(model, (x,), options={"backend": "eager"}, check="site", target=target)

    assert [event.kernel for event in fast.report.fused] == [kernel]
    assert torch.equal(fast(x), model(x))
