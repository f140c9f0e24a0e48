"""Of the rules that missed at a node, the one that explains most."""

from __future__ import annotations

from collections.abc import Iterable

from qfuse.ir.events import Missed

# Rules that recognize quantization which is written out, or import a quantized op.
_RECOGNIZE = (
    *("normalize-", "quantize-", "dequantize-", "choose-", "float-zero-point", "import-"),
    *("fuse-int-product", "int-mm-shift", "fuse-scaled-product", "regroup-dequantize"),
)
# Parts of a pattern that match nearly everywhere, such as a cast.
_LEAST_PROGRESS = 2
# Rules that make several products one, whatever their dtype.
_MERGE = ("merge-", "fuse-repeated-heads")


def closest(misses: Iterable[Missed]) -> dict[str, Missed]:
    """Return, by the name of the node, the miss of the rule that came closest.

    A later stage sees the graph that remains, so at equal progress its rule wins.
    """
    best: dict[str, Missed] = {}
    for miss in misses:
        known = best.get(miss.anchor.node)
        if known is None or _rank(miss) >= _rank(known):
            best[miss.anchor.node] = miss
    return best


def explains_input(miss: Missed) -> bool:
    """Whether the miss is of a rule that would have recognized a quantization."""
    return miss.rule.startswith(_RECOGNIZE) and miss.progress >= _LEAST_PROGRESS


def merges(miss: Missed) -> bool:
    """Whether the miss is of a rule that merges products: it does not say why one is float."""
    return miss.rule.startswith(_MERGE)


def _rank(miss: Missed) -> int:
    return miss.progress
