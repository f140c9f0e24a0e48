"""Valid models with odd corners go the whole way, and give what they gave before."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import qfuse


class Odd(nn.Module):
    """A model with the constants that its forward needs."""

    def __init__(self, **constants: torch.Tensor) -> None:
        super().__init__()
        for name, value in constants.items():
            self.register_buffer(name, value)


def compiled(
    model: nn.Module, *args: torch.Tensor, own_kernels: bool = True, **options: object
) -> qfuse.CompiledModel:
    """Compile without a backend; nothing may have been rolled back."""
    chosen = {"backend": "eager", "own_kernels": own_kernels}
    fast = qfuse.compile(model.eval(), args, options=chosen, **options)  # type: ignore[arg-type]
    assert not fast.report.rolled_back, fast.report.rolled_back
    return fast


def int8(*shape: int) -> torch.Tensor:
    """Random stored numbers."""
    return torch.randint(-128, 128, shape, dtype=torch.int8)


class Spread(Odd):
    """Contracts an axis of one element with one of several."""

    one: torch.Tensor
    many: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.einsum("bk,nk->bn", x, self.one)
        return y + torch.tensordot(x[:, :1], self.many, ([1], [1]))


class CrossedBounds(Odd):
    """A clamp whose bounds are the wrong way round behind a quantized linear."""

    q: torch.Tensor
    s: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self.q.float() * self.s)
        return torch.clamp(y, min=1.0, max=-1.0)


def test_an_axis_that_is_spread_is_no_linear() -> None:
    model = Spread(one=torch.randn(16, 1), many=torch.randn(16, 8))
    x = torch.randn(2, 8)

    torch.testing.assert_close(compiled(model, x)(x), model(x))


def test_crossed_bounds_are_kept() -> None:
    model = CrossedBounds(q=int8(16, 32), s=torch.tensor(0.01))
    x = torch.randn(3, 32)

    for own_kernels in (True, False):
        assert torch.equal(compiled(model, x, own_kernels=own_kernels)(x), model(x))
