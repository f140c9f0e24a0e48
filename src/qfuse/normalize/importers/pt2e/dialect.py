"""The dialect of PT2E: ``quantized_decomposed.*``, from ``convert_pt2e`` and ExecuTorch."""

from __future__ import annotations

from typing import Any

from qfuse.normalize.importers.dialect import Dialect
from qfuse.normalize.importers.pt2e.cast import NormalizeElementCast
from qfuse.normalize.importers.pt2e.choose_qparams import (
    NormalizeChoosePerTensor,
    NormalizeChoosePerToken,
)
from qfuse.normalize.importers.pt2e.per_channel import (
    NormalizeDequantizePerChannel,
    NormalizeQuantizePerChannel,
)
from qfuse.normalize.importers.pt2e.per_group import (
    NormalizeDequantizePerGroup,
    NormalizeQuantizePerGroup,
)
from qfuse.normalize.importers.pt2e.per_tensor import (
    NormalizeDequantizePerTensor,
    NormalizeQuantizePerTensor,
)
from qfuse.normalize.importers.pt2e.per_token import (
    NormalizeDequantizePerToken,
    NormalizeQuantizePerToken,
)
from qfuse.rewrite.rule import Rule


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
            "its shape function returns float64 and its kernel does not, so it is only "
            "supported together with a per-token quantize or dequantize"
        ),
        "quantized_decomposed::fake_quant_per_channel": (
            "it is an op of training, which keeps its values in floating point"
        ),
    },
)
