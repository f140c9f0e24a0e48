"""Models that call the products of libraries, and what compiling them has to give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import qfuse
from qfuse.api import CompiledModel
from qfuse.capture import capture
from qfuse.ir.events import Missed, Noted
from qfuse.normalize import normalize
from qfuse.report import Report
from qfuse.targets import Target

NOISE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""The rounding error of a product in each dtype, relative to its greatest value."""


class Model(nn.Module):
    """Calls a function of its buffers."""

    def __init__(self, function: Callable[..., Any], **buffers: torch.Tensor) -> None:
        super().__init__()
        self.function = function
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, *args: torch.Tensor) -> Any:
        """Call the function with this module first."""
        return self.function(self, *args)


def weights(*shape: int) -> torch.Tensor:
    """Draw int8 weights, ``[N, K, ...]``, whose products with ``activations`` are exact anywhere.

    Without VNNI, oneDNN adds products of uint8 and int8 in pairs that saturate at 16 bits, where
    qfuse is exact. No pair of these does: of each input feature the weights have 7 bits, or the
    activations. So a product is within 255 * 64 or 127 * 128, half of the 16 bits.
    """
    codes = torch.randint(-128, 128, shape, dtype=torch.int8)
    codes[:, ::2] //= 2
    return codes


def activations(*shape: int, dtype: torch.dtype = torch.uint8, features: int = -1) -> torch.Tensor:
    """Draw activations for ``weights``, with input features on the axis ``features``."""
    codes = torch.randint(0, 256, shape, dtype=torch.uint8)
    codes.movedim(features, -1)[..., 1::2] //= 2
    # oneDNN may multiply int8 as uint8, 128 higher.
    return codes if dtype is torch.uint8 else (codes ^ 128).view(dtype)


def compiled(model: nn.Module, *args: torch.Tensor) -> CompiledModel:
    """Compile for a pinned target; values are checked rewrite by rewrite."""
    done = qfuse.compile(
        model.eval(),
        args,
        check="site",
        options={"backend": "eager"},
        target=Target.for_testing(isa="avx512_vnni"),
    )
    assert not done.report.rolled_back
    return done


def kernel_of(report: Report) -> str:
    """The kernel of the only quantized op."""
    (event,) = report.fused
    return event.kernel


def close(new: torch.Tensor, old: torch.Tensor, noise: float) -> None:
    """Assert that values are equal up to ``noise``, relative to the greatest one."""
    assert new.dtype == old.dtype
    assert new.shape == old.shape
    size = float(old.float().abs().max()) if old.numel() else 1.0
    torch.testing.assert_close(new.float(), old.float(), rtol=0, atol=noise * max(size, 1e-6))


def one_step_apart(new: torch.Tensor, old: torch.Tensor) -> None:
    """Assert that quantized values are equal, but for a few next to ties."""
    assert new.dtype == old.dtype
    apart = (new.int() - old.int()).abs()
    assert int(apart.max()) <= 1
    assert float((apart > 0).float().mean()) < 0.02


def miss_of(model: nn.Module, *args: torch.Tensor) -> Missed:
    """The refusal of the only product of a model, which the report warns about."""
    normal = normalize(capture(model.eval(), args))
    (miss,) = (m for m in normal.log.of(Missed) if m.rule.startswith("normalize-"))
    assert any(miss.reason in note.text for note in normal.log.of(Noted) if note.warn)
    return miss
