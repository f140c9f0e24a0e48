"""Packed weights of checkpoints, unpacked by ops of the graph: stored as integers, on a kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qfuse
from qfuse.targets import Target

pytestmark = [pytest.mark.numeric, pytest.mark.own_kernels]

K, N, GROUP = 128, 64, 32
# Where AWQ puts the values of a word, and where they are found.
ORDER, BACK = [0, 2, 4, 6, 1, 3, 5, 7], [0, 4, 1, 5, 2, 6, 3, 7]


def awq(values: torch.Tensor) -> torch.Tensor:
    """Pack eight neighbouring columns into a word, as AWQ does."""
    words = values.reshape(values.shape[0], -1, 8)[..., ORDER].long() << torch.arange(0, 32, 4)
    return words.sum(-1).to(torch.int32)


class Awq(nn.Module):
    """A linear with an AWQ weight."""

    qweight: torch.Tensor
    qzeros: torch.Tensor
    scales: torch.Tensor

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.register_buffer("qweight", awq(torch.randint(0, 16, (K, N))))
        self.register_buffer("qzeros", awq(torch.randint(4, 12, (K // GROUP, N))))
        self.register_buffer("scales", torch.rand(K // GROUP, N) * 0.02 + 0.003)

    def unpacked(self, words: torch.Tensor) -> torch.Tensor:
        shifts = torch.arange(0, 32, 4, dtype=torch.int32)
        values = words[:, :, None] >> shifts
        if self.form == "columns":
            values = values.view(words.shape[0], -1)
            order = torch.arange(values.shape[-1]).view(-1, 8)[:, torch.tensor(BACK)].view(-1)
            return values[:, order] & 15
        if self.form == "stack":
            values = torch.stack([words >> (4 * place) for place in BACK], -1)
            return values.reshape(words.shape[0], -1) & 15
        return values[:, :, torch.tensor(BACK)].reshape(words.shape[0], -1) & 15

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        zeros = self.unpacked(self.qzeros).repeat_interleave(GROUP, 0)
        scale = self.scales.repeat_interleave(GROUP, 0)
        return x @ ((self.unpacked(self.qweight) - zeros) * scale)


class BitNet(nn.Module):
    """A linear with ternary values, four to a byte, and a scale that divides."""

    packed: torch.Tensor
    scale: torch.Tensor

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        v = torch.randint(0, 3, (4, N // 4, K), dtype=torch.uint8)
        self.register_buffer("packed", v[0] | v[1] << 2 | v[2] << 4 | v[3] << 6)
        self.register_buffer(
            "scale", torch.rand(N, 1) + 20 if "rows" in form else torch.ones(1) * 37.5
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "mask" in self.form:
            parts = [(self.packed & (3 << 2 * i)) >> 2 * i for i in range(4)]
        else:
            parts = [(self.packed >> 2 * i) & 3 for i in range(4)]
        if "assigned" in self.form:
            # As transformers does.
            joined = torch.zeros(N, K, dtype=torch.uint8)
            for i, part in enumerate(parts):
                joined[i * N // 4 : (i + 1) * N // 4] = part
        else:
            joined = torch.cat(parts)
        w = joined.to(x.dtype) - 1
        if "result" in self.form:
            return F.linear(x, w) / self.scale
        return F.linear(x, w / self.scale)


MODELS: dict[str, Any] = {
    **{f"awq {form}": (Awq, form) for form in ("columns", "stack", "words")},
    **{
        f"bitnet {form}": (BitNet, form)
        for form in ("weight", "rows", "result", "mask result", "mask assigned result")
    },
}


@pytest.mark.parametrize("name", MODELS)
def test_a_packed_weight_is_stored_in_integers(name: str) -> None:
    kind, form = MODELS[name]
    model, x = kind(form).eval(), torch.randn(5, K)
    target = Target.for_testing(isa="avx512_vnni")
    options: dict[str, Any] = {"backend": "eager"}
    fast = qfuse.compile(model, (x,), options=options, check="site", target=target)

    assert [event.kernel for event in fast.report.fused] == ["qfuse.linear_w4a16"]
    assert fast.report.rolled_back == ()
    torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(fast(2 * x), model(2 * x), rtol=1e-4, atol=1e-4)
