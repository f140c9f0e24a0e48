"""What an accelerator simulator calls quantization, in the language of qfuse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch._ops import OpOverload

from qfuse.normalize.importers.dialect import Dialect
from qfuse.rewrite.rule import Rule
from simulator_dialect import ops
from simulator_dialect.linears import Fp8Linear, Int4Linear, Mxfp4Linear, StaticQuantLinear
from simulator_dialect.quantizes import DynamicQuantize, DynamicQuantizeMxfp4, StaticQuantize
from simulator_dialect.spell_linears import SpellStaticLinear, SpellWeightOnlyLinear
from simulator_dialect.spell_quantizes import SpellDynamicQuantize, SpellStaticQuantize

__all__ = ["dialect", "ops"]


def _rules() -> list[Rule[Any]]:
    return [
        StaticQuantize(),
        DynamicQuantize(),
        DynamicQuantizeMxfp4(),
        StaticQuantLinear(),
        Int4Linear(),
        Fp8Linear(),
        Mxfp4Linear(),
    ]


def _spell(source: Mapping[str, OpOverload]) -> list[Rule[Any]]:
    del source  # What an op looks like in the canonical language tells which it was.
    return [
        SpellStaticLinear(),
        SpellWeightOnlyLinear(),
        SpellDynamicQuantize(),
        SpellStaticQuantize(),
    ]


dialect = Dialect(
    "simulator",
    _rules,
    frozenset({"simulator"}),
    spell=_spell,
)
