"""A layer as Llama has it, in each of the simulator's kinds of linears, with a seed or on meta."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from simulator_dialect import ops

KINDS = ("mm", "addmm", "static", "int4", "fp8", "mxfp4")
_HEADS, _KV_HEADS, _HEAD, _WIDE = 4, 2, 8, 48
_MODEL = _HEADS * _HEAD
_GROUP = 8
_SCALE = 0.05


class Layer(nn.Module):
    """Attention and a gated feed-forward net, each after a norm. Without positions.

    Args:
        kind: One of :data:`KINDS`.
        device: ``"meta"`` for a graph of shapes alone.
    """

    def __init__(self, kind: str, device: str = "cpu") -> None:
        super().__init__()
        self.kind = kind
        sizes = {"q": _MODEL, "k": _KV_HEADS * _HEAD, "v": _KV_HEADS * _HEAD, "o": _MODEL}
        sizes |= {"gate": _WIDE, "up": _WIDE, "down": _MODEL}
        for name, n in sizes.items():
            k = _WIDE if name == "down" else _MODEL
            for part, value in _parts(kind, n, k).items():
                self.register_buffer(f"{name}_{part}", value.to(device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the shape of ``x``, ``[batch, tokens, model]``."""
        batch, tokens, _ = x.shape
        h = F.rms_norm(x, (_MODEL,))
        q, k, v = (self._linear(name, h) for name in ("q", "k", "v"))
        q = q.view(batch, tokens, _HEADS, _HEAD).transpose(1, 2)
        k, v = (t.view(batch, tokens, _KV_HEADS, _HEAD).transpose(1, 2) for t in (k, v))
        k, v = (t.repeat_interleave(_HEADS // _KV_HEADS, 1) for t in (k, v))
        scores = torch.softmax(q @ k.transpose(-1, -2) / _HEAD**0.5, -1)
        mixed = (scores @ v).transpose(1, 2).reshape(batch, tokens, _MODEL)
        x = x + self._linear("o", mixed)
        h = F.rms_norm(x, (_MODEL,))
        return x + self._linear("down", F.silu(self._linear("gate", h)) * self._linear("up", h))

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        calls: dict[str, Callable[[str, torch.Tensor], torch.Tensor]] = {
            "mm": self._mm,
            "addmm": self._addmm,
            "static": self._static,
            "int4": self._int4,
            "fp8": self._fp8,
            "mxfp4": self._mxfp4,
        }
        return calls[self.kind](name, x)

    def _of(self, name: str, part: str) -> torch.Tensor:
        return self.get_buffer(f"{name}_{part}")

    def _mm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        y = torch.mm(x.reshape(-1, x.shape[-1]), self._of(name, "weight"))
        return y.view(*x.shape[:-1], -1)

    def _addmm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        y = torch.addmm(self._of(name, "bias"), rows, self._of(name, "weight"))
        return y.view(*x.shape[:-1], -1)

    def _static(self, name: str, x: torch.Tensor) -> torch.Tensor:
        # Each linear brings the scale of its own input, as quantizers leave it; they are equal.
        q = ops.quantize(x, self._of(name, "in_scale"), self._of(name, "in_zero"), 8)
        weight, scale = self._of(name, "weight"), self._of(name, "scale")
        bias = self._of(name, "bias")
        y = ops.static_quant_linear(q, _SCALE, 3, weight, scale, bias, _SCALE, -2)
        return (y.float() + 2) * _SCALE

    def _int4(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return ops.int4_linear(x, self._of(name, "weight"), self._of(name, "scale"), None, _GROUP)

    def _fp8(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight, scale = self._of(name, "weight"), self._of(name, "scale")
        return ops.fp8_linear(x, weight, scale, self._of(name, "bias"))

    def _mxfp4(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return ops.mxfp4_linear(x, self._of(name, "weight"), self._of(name, "exponent"), None)


def _parts(kind: str, n: int, k: int) -> dict[str, torch.Tensor]:
    """Return the tensors of one linear of ``n`` features from ``k``."""
    row, bias = torch.rand(n) * 0.02 + 1e-3, torch.randn(n) * 0.1
    match kind:
        case "mm":
            return {"weight": torch.randn(k, n) / k**0.5}
        case "addmm":
            return {"weight": torch.randn(k, n) / k**0.5, "bias": bias}
        case "static":
            weight = torch.randint(-128, 128, (n, k)).to(torch.int8)
            scales = {"in_scale": torch.tensor(_SCALE), "in_zero": torch.tensor(3).to(torch.int8)}
            return {"weight": weight, "scale": row * 0.1, "bias": bias, **scales}
        case "int4":
            weight = torch.randint(0, 256, (n, k // 2)).to(torch.uint8)
            return {"weight": weight, "scale": torch.rand(n, k // _GROUP) * 0.05 + 1e-3}
        case "fp8":
            return {"weight": torch.randn(n, k).to(torch.float8_e4m3fn), "scale": row, "bias": bias}
        case _:
            weight = torch.randint(0, 16, (n, k)).to(torch.uint8)
            return {"weight": weight, "exponent": torch.randint(-6, -2, (n, k // 8)).to(torch.int8)}
