"""The dialects that come with qfuse, in the order in which their rules are tried."""

from __future__ import annotations

from qfuse.normalize import aten
from qfuse.normalize.decomposed import DECOMPOSED
from qfuse.normalize.dialect import Dialect
from qfuse.normalize.torchao_affine import TORCHAO_AFFINE

__all__ = ["BUILTIN"]

BUILTIN: tuple[Dialect, ...] = (DECOMPOSED, TORCHAO_AFFINE, Dialect("aten", aten.rules))
