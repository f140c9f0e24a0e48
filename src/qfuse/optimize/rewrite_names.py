"""The names of the rewrites of this stage."""

from __future__ import annotations

from qfuse.optimize.lower_precision import LowerPrecision
from qfuse.optimize.schedule import ATTENTION_RULES, FUSION_RULES, REWRITES

FUSING = frozenset((*(rule.name for rule in FUSION_RULES), LowerPrecision.name))
"""Rules that extend one linear with its neighbors, and the pass that lowers float products.

All others except `ATTENTION` move, combine and merge, or enable fusions of ops that became
adjacent: a norm or an activation and its quantize, two quantizations.
"""

ATTENTION = frozenset(rule.name for rule in ATTENTION_RULES)
"""Rules that change how attention loads its operands; they do not involve quantization."""


def rewrite_names() -> frozenset[str]:
    """Return the names of the rules and passes of this stage."""
    return frozenset(kind.name for kind in REWRITES)
