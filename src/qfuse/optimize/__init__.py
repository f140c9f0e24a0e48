"""The optimize stage: from the normal form to fused ops (NormalGraph to OptimizedGraph)."""

from qfuse.optimize.installed import check_rule_names, checked_rules, installed_rules
from qfuse.optimize.rewrite_names import ATTENTION, FUSING, rewrite_names
from qfuse.optimize.schedule import optimize, rules_for_claims

__all__ = [
    "ATTENTION",
    "FUSING",
    "check_rule_names",
    "checked_rules",
    "installed_rules",
    "optimize",
    "rewrite_names",
    "rules_for_claims",
]
