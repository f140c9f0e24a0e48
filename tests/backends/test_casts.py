"""A cast that rounds on purpose rounds in compiled code too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import qfuse
from qfuse.backends.casts import rounds_by_casts
from qfuse.backends.prepare import prepare
from qfuse.targets import Target

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
Function = Callable[[torch.Tensor], torch.Tensor]

READ_WIDER: dict[str, Function] = {
    "cast": lambda x: x.to(BF16).to(F32),
    "split in two terms": lambda x: x - x.to(BF16).to(F32),
    "promoted": lambda x: x.to(F16) * x,
    "reduced": lambda x: x.to(BF16).sum(1, dtype=F32),
    "moved": lambda x: x.to(F16).t().unsqueeze(0).to(F32),
    "parts": lambda x: torch.cat(torch.split(x.to(F16), 2, 1)[::-1], 1).to(F32),
    "to another float of its size": lambda x: x.to(BF16).to(F16),
    "negative, split in two terms": lambda x: x + (-x.to(BF16)).to(F32),
    "clamped": lambda x: x - x.to(BF16).clamp(-150, 150).to(F32),
    "selected": lambda x: torch.where(x > 0, x.to(BF16), 0).relu().abs().to(F32),
    "greatest": lambda x: torch.maximum(x.to(BF16), x.to(BF16).amax(1, True)).to(F32),
    "padded": lambda x: torch.nn.functional.pad(x.to(BF16), (1, 1)).to(F32),
    "compared": lambda x: x.to(BF16) == x,
    "copied": lambda x: torch.empty(x.shape, dtype=BF16).copy_(x).to(F32),
    "from double": lambda x: x.to(F64).to(BF16).to(F64),
}
OTHERS: dict[str, Function] = {
    "result": lambda x: x.to(BF16),
    "read as it is": lambda x: torch.relu(x.to(BF16)),
    "selected as it is": lambda x: torch.relu(x.to(BF16)).neg().clamp(min=-3),
    "widened": lambda x: x.to(F64).to(F32),
    "to integers": lambda x: x.to(F16).to(torch.int8),
    "product": lambda x: torch.mm(x.to(BF16), x.to(BF16).t()).to(F32),
    "without a cast": lambda x: x.relu(),
}


class Applied(torch.nn.Module):
    """Functions as a module."""

    def __init__(self, *functions: Function) -> None:
        super().__init__()
        self._functions = functions

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(function(x) for function in self._functions)


@pytest.mark.parametrize("name", [*READ_WIDER, *OTHERS])
def test_a_value_is_read_as_another_float(name: str) -> None:
    module = Applied((READ_WIDER | OTHERS)[name])
    options = {"backend": "eager"}
    fast = qfuse.compile(
        module, (torch.randn(3, 4),), target=Target.for_testing(), check="off", options=options
    )

    assert rounds_by_casts(prepare(fast.plan.lowered)) == (name in READ_WIDER)


@pytest.mark.numeric
def test_values_are_rounded_as_in_the_source() -> None:
    module = Applied(*READ_WIDER.values())
    x = torch.randn(3, 4) * 100
    fast = qfuse.compile(module, (x,))

    assert fast.backend == "aoti"
    for name, answer, expected in zip(READ_WIDER, fast(x), module(x), strict=True):
        # A sum may add in another order.
        torch.testing.assert_close(
            answer, expected, rtol=1e-6 if name == "reduced" else 0, atol=0, msg=name
        )
