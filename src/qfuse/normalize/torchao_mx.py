"""The dialect of torchao's ``MXTensor``, which an exported graph holds op by op."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qfuse.normalize.dialect import Dialect
from qfuse.normalize.mx_choose import NormalizeMxChoose
from qfuse.normalize.mx_dequantize import NormalizeMxDequantize
from qfuse.normalize.mx_quantize import NormalizeMxQuantize

if TYPE_CHECKING:
    from qfuse.rewrite.rule import Rule

__all__ = ["TORCHAO_MX"]


def _rules() -> list[Rule[Any]]:
    return [NormalizeMxChoose(), NormalizeMxQuantize(), NormalizeMxDequantize()]


TORCHAO_MX = Dialect("torchao-mx", _rules)
