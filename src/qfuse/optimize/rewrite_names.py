"""The names of the rewrites of this stage."""

from __future__ import annotations

from qfuse.optimize.lower_precision import LowerPrecision
from qfuse.optimize.schedule import ATTENTION_RULES, FUSION_RULES, REWRITES

FUSING = frozenset((*(rule.name for rule in FUSION_RULES), LowerPrecision.name))
"""What grows one linear by what stands around it, and what narrows those that are left.

Everything else but `ATTENTION` moves, combines and merges, or enables fusions of ops that became
adjacent that way: a norm or an activation and its quantize, two quantizations.
"""

ATTENTION = frozenset(rule.name for rule in ATTENTION_RULES)
"""What changes how attention reads its operands; no quantization has a part in it."""


def rewrite_names() -> frozenset[str]:
    """Return the names of the rules and passes of this stage."""
    return frozenset(kind.name for kind in REWRITES)
