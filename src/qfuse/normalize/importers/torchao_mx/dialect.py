"""The dialect of torchao's ``MXTensor``, which exported graphs contain op by op."""

from __future__ import annotations

from typing import Any

from qfuse.normalize.importers.dialect import Dialect
from qfuse.normalize.importers.torchao_mx.choose import NormalizeMxChoose
from qfuse.normalize.importers.torchao_mx.dequantize import NormalizeMxDequantize
from qfuse.normalize.importers.torchao_mx.quantize import NormalizeMxQuantize
from qfuse.rewrite.rule import Rule


def _rules() -> list[Rule[Any]]:
    return [NormalizeMxChoose(), NormalizeMxQuantize(), NormalizeMxDequantize()]


TORCHAO_MX = Dialect("torchao-mx", _rules)
