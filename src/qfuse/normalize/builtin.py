"""The dialects that are part of qfuse, in the order in which their rules are tried."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from qfuse.extensions import OWN
from qfuse.normalize.aten import rules as aten
from qfuse.normalize.aten.cast_rules import CASTS
from qfuse.normalize.aten.linear.to_mm import SpellMm
from qfuse.normalize.importers.dialect import Dialect
from qfuse.normalize.importers.library.dialect import LIBRARY
from qfuse.normalize.importers.pt2e.dialect import DECOMPOSED
from qfuse.normalize.importers.torchao.dialect import TORCHAO_AFFINE
from qfuse.normalize.importers.torchao_mx.dialect import TORCHAO_MX

ATEN = Dialect("aten", aten.rules, spell=lambda source: [SpellMm(source)])

BUILTIN: Sequence[Dialect] = tuple(
    replace(dialect, origin=OWN)
    for dialect in (DECOMPOSED, TORCHAO_AFFINE, TORCHAO_MX, LIBRARY, CASTS, ATEN)
)
