"""The dialect of torchao's affine ops, as tensor subclasses leave them in an exported graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qfuse.normalize.affine_choose import NormalizeChooseAffine
from qfuse.normalize.affine_dequantize import NormalizeDequantizeAffine
from qfuse.normalize.affine_quantize import NormalizeQuantizeAffine
from qfuse.normalize.dialect import Dialect
from qfuse.normalize.float8_choose import NormalizeChooseFloat8
from qfuse.normalize.float8_edge import NormalizeDequantizeFloat8, NormalizeQuantizeFloat8

if TYPE_CHECKING:
    from qfuse.rewrite.rule import Rule

__all__ = ["TORCHAO_AFFINE"]


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
