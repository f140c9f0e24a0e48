"""The names of everything that this room rewrites."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import isabstract
from typing import Any

from qfuse.rewrite.graph_pass import Pass
from qfuse.rewrite.rule import Rule

FUSING = frozenset(
    (
        "fuse-linear",
        "fuse-activation",
        "fuse-add",
        "fuse-cast",
        "fuse-output-quantize",
        "narrow-floats",
    )
)
"""What grows one linear by what stands around it, and what narrows those that are left.

Everything else but `ATTENTION` moves, combines and merges, or lets what has come to stand next to
each other that way become one: a norm or an activation and its quantize, two quantizations.
"""

ATTENTION = frozenset(("fuse-repeated-heads", "merge-queries"))
"""What changes how attention reads its operands; no quantization has a part in it."""


def rewrite_names() -> frozenset[str]:
    """Return the names of the rules and passes of this room."""
    stage = __name__.rpartition(".")[0]
    kinds = [kind for base in (Rule, Pass) for kind in _below(base) if not isabstract(kind)]
    return frozenset(kind.name for kind in kinds if kind.__module__.startswith(f"{stage}."))


def _below(base: type[Any]) -> Iterator[type[Any]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _below(kind)
