from __future__ import annotations

from collections.abc import Callable

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
from torch.fx import Node

import qfuse
from qfuse.ir.events import MissCode
from qfuse.normalize.aten.int_matmul.fold_factor import FoldFactor
from qfuse.targets import Target
from qfuse.testing.build import GraphBuilder

K, N = 12, 5


def product(b: GraphBuilder, w: Node) -> Node:
    return b.call(aten._int_mm.default, b.arg("x", torch.int8, "m", K), w)


def test_golden_a_matrix_of_a_stack() -> None:
    b = GraphBuilder()
    w = b.call(aten.select.int, b.const("w", codes(3, N, K)), 0, 1)
    program = finish(b, product(b, b.call(aten.t.default, w)))
    assert_expected_inline(
        golden(program, FoldFactor()),
        """\
const %w_factor: int8[5, 12]
%0 = aten.t(%w_factor): int8[12, 5]
%x: int8[s0, 12]
%1 = aten._int_mm(%x, %0): int32[s0, 5]
return (%1)
fired: fold-factor 1""",
    )


def test_a_view_shares_the_memory_of_the_constant() -> None:
    b = GraphBuilder()
    held = codes(3, N, K)
    w = b.call(aten.select.int, b.const("w", held), 0, 1)
    program = finish(b, product(b, b.call(aten.t.default, w)))
    golden(program, FoldFactor())
    made = [c for name, c in program.module.named_buffers() if name != "w"]
    assert [c.untyped_storage().data_ptr() for c in made] == [held.untyped_storage().data_ptr()]


def test_refuses_factors_that_are_constants_or_vary() -> None:
    b = GraphBuilder()
    program = finish(b, product(b, b.call(aten.t.default, b.const("w", codes(N, K)))))
    assert refusal(program, FoldFactor()) == (MissCode.NOT_CONSTANT, "_int_mm_default")

    b = GraphBuilder()
    w = b.call(aten.select.int, b.arg("w", torch.int8, 3, K, N), 0, 1)
    program = finish(b, product(b, w))
    assert refusal(program, FoldFactor()) == (MissCode.NOT_CONSTANT, "_int_mm_default")


def test_refuses_a_factor_that_the_caller_gets() -> None:
    b = GraphBuilder()
    w = b.call(aten.select.int, b.const("w", codes(3, K, N)), 0, 1)
    program = finish(b, product(b, w), w)
    assert refusal(program, FoldFactor()) == (MissCode.NOT_CONSTANT, "_int_mm_default")


def test_refuses_random_factors() -> None:
    b = GraphBuilder()
    w = b.call(aten.randint_like.default, b.const("w", codes(K, N)), 100)
    program = finish(b, product(b, w))
    assert refusal(program, FoldFactor()) == (MissCode.NOT_CONSTANT, "_int_mm_default")


@pytest.mark.numeric
@pytest.mark.parametrize("turned", [False, True])
def test_integers_are_the_same(turned: bool) -> None:
    b = GraphBuilder()
    w = b.const("w", codes(9, K) if turned else codes(K, 9))
    w = b.call(aten.slice.Tensor, w, 0 if turned else 1, 2, 7)
    w = b.call(aten.t.default, w) if turned else w
    fired = assert_same_values(finish(b, product(b, w)), [codes(4, K)], FoldFactor(), exact=True)
    assert fired.fired == {"fold-factor": 1}


class _Packed(nn.Module):
    """A linear whose int8 weight is a part of a buffer, or computed from it."""

    w: torch.Tensor
    scale: torch.Tensor

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        parts = torch.randint(-127, 128, (3, 48, 64), dtype=torch.int8)
        self.register_buffer("w", parts.reshape(144, 64) if form == "slice" else parts)
        self.register_buffer("scale", torch.rand(48) * 0.01 + 0.001)

    def weight(self) -> torch.Tensor:
        of: dict[str, Callable[[], torch.Tensor]] = {
            "slice": lambda: self.w[48:96],
            "select": lambda: self.w[1],
            "stack": lambda: torch.cat([self.w[2, :24], self.w[0, 24:]]),
            "unbind": lambda: self.w.unbind(0)[2],
        }
        return of[self.form]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        s = x.abs().amax(-1, keepdim=True).clamp(min=1e-5) / 127
        q = torch.clamp(torch.round(x / s), -128, 127).to(torch.int8)
        return torch._int_mm(q, self.weight().t()) * s * self.scale


@pytest.mark.numeric
@pytest.mark.own_kernels
@pytest.mark.parametrize("form", ["slice", "select", "stack", "unbind"])
def test_every_spelling_runs_on_the_int8_kernel(form: str) -> None:
    model, x = _Packed(form).eval(), torch.randn(24, 64)
    target = Target.for_testing(isa="avx512_vnni")
    fast = qfuse.compile(model, (x,), options={"backend": "eager"}, check="site", target=target)

    assert [event.kernel for event in fast.report.fused] == ["qfuse.linear_w8a8"]
    assert fast.report.rolled_back == ()
    torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-4)
