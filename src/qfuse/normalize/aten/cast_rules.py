"""The dialect of casts that autocast inserts around quantize and dequantize, which absorb them."""

from __future__ import annotations

from typing import Any

from qfuse.normalize.aten.qdq.fold_cast_into_dequantize import FoldCastIntoDequantize
from qfuse.normalize.aten.qdq.fold_cast_into_quantize import FoldCastIntoQuantize
from qfuse.normalize.importers.dialect import Dialect
from qfuse.rewrite.rule import Rule


def _rules() -> list[Rule[Any]]:
    return [FoldCastIntoDequantize(), FoldCastIntoQuantize()]


CASTS = Dialect("casts", _rules)
