"""The dialects that come with qfuse, in the order in which their rules are tried."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qfuse.normalize import aten
from qfuse.normalize.casts import CASTS
from qfuse.normalize.decomposed import DECOMPOSED
from qfuse.normalize.dialect import Dialect
from qfuse.normalize.spell_mm import SpellMm
from qfuse.normalize.torchao_affine import TORCHAO_AFFINE
from qfuse.normalize.torchao_mx import TORCHAO_MX

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ATEN", "BUILTIN"]

ATEN = Dialect("aten", aten.rules, spell=lambda source: [SpellMm(source)])

BUILTIN: Sequence[Dialect] = (DECOMPOSED, TORCHAO_AFFINE, TORCHAO_MX, CASTS, ATEN)
