"""The dialect of casts that autocast puts around quantization, which absorbs them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qfuse.normalize.dialect import Dialect
from qfuse.normalize.fold_cast_into_dequantize import FoldCastIntoDequantize
from qfuse.normalize.fold_cast_into_quantize import FoldCastIntoQuantize

if TYPE_CHECKING:
    from qfuse.rewrite.rule import Rule

__all__ = ["CASTS"]


def _rules() -> list[Rule[Any]]:
    return [FoldCastIntoDequantize(), FoldCastIntoQuantize()]


CASTS = Dialect("casts", _rules)
