"""What an accelerator simulator calls quantization, in the language of qfuse."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qfuse.normalize.dialect import Dialect
from simulator_dialect import ops
from simulator_dialect.linears import Fp8Linear, Int4Linear, StaticQuantLinear
from simulator_dialect.quantizes import DynamicQuantize, StaticQuantize

if TYPE_CHECKING:
    from qfuse.rewrite.rule import Rule

__all__ = ["dialect", "ops"]

_NO_MX = "the language has no MX formats yet"


def _rules() -> list[Rule[Any]]:
    return [StaticQuantize(), DynamicQuantize(), StaticQuantLinear(), Int4Linear(), Fp8Linear()]


dialect = Dialect(
    "simulator",
    _rules,
    frozenset({"simulator"}),
    {"simulator::dynamic_quantize_mxfp4": _NO_MX, "simulator::mxfp4_linear": _NO_MX},
)
