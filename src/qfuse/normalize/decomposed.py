"""The dialect of PT2E: ``quantized_decomposed.*``, as ``convert_pt2e`` and ExecuTorch make it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qfuse.normalize.decomposed_cast import NormalizeElementCast
from qfuse.normalize.decomposed_choose import (
    NormalizeChoosePerTensor,
    NormalizeChoosePerToken,
)
from qfuse.normalize.decomposed_per_channel import (
    NormalizeDequantizePerChannel,
    NormalizeQuantizePerChannel,
)
from qfuse.normalize.decomposed_per_group import (
    NormalizeDequantizePerGroup,
    NormalizeQuantizePerGroup,
)
from qfuse.normalize.decomposed_per_tensor import (
    NormalizeDequantizePerTensor,
    NormalizeQuantizePerTensor,
)
from qfuse.normalize.decomposed_per_token import (
    NormalizeDequantizePerToken,
    NormalizeQuantizePerToken,
)
from qfuse.normalize.dialect import Dialect

if TYPE_CHECKING:
    from qfuse.rewrite.rule import Rule

__all__ = ["DECOMPOSED"]


def _rules() -> list[Rule[Any]]:
    return [
        NormalizeQuantizePerTensor(),
        NormalizeDequantizePerTensor(),
        NormalizeQuantizePerChannel(),
        NormalizeDequantizePerChannel(),
        NormalizeQuantizePerToken(),
        NormalizeDequantizePerToken(),
        NormalizeQuantizePerGroup(),
        NormalizeDequantizePerGroup(),
        NormalizeChoosePerTensor(),
        NormalizeChoosePerToken(),
        NormalizeElementCast(),
    ]


DECOMPOSED = Dialect(
    "decomposed",
    _rules,
    frozenset({"quantized_decomposed"}),
    {
        "quantized_decomposed::choose_qparams_per_token": (
            "its shape function promises float64 and its kernel does not keep the promise, so it "
            "is only understood together with a per-token quantize or dequantize"
        ),
        "quantized_decomposed::fake_quant_per_channel": (
            "it is an op of training, which keeps its values in floating point"
        ),
    },
)
