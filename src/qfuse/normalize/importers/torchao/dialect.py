"""The dialect of torchao's affine ops, as tensor subclasses export them."""

from __future__ import annotations

from typing import Any

from qfuse.normalize.importers.dialect import Dialect
from qfuse.normalize.importers.torchao.choose_float8 import NormalizeChooseFloat8
from qfuse.normalize.importers.torchao.choose_qparams import NormalizeChooseAffine
from qfuse.normalize.importers.torchao.dequantize import NormalizeDequantizeAffine
from qfuse.normalize.importers.torchao.float8 import (
    NormalizeDequantizeFloat8,
    NormalizeQuantizeFloat8,
)
from qfuse.normalize.importers.torchao.quantize import NormalizeQuantizeAffine
from qfuse.rewrite.rule import Rule


def _rules() -> list[Rule[Any]]:
    return [
        NormalizeQuantizeAffine(),
        NormalizeDequantizeAffine(),
        NormalizeChooseAffine(),
        NormalizeQuantizeFloat8(),
        NormalizeDequantizeFloat8(),
        NormalizeChooseFloat8(),
    ]


TORCHAO_AFFINE = Dialect("torchao-affine", _rules, frozenset({"torchao"}))
