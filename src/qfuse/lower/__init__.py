"""Lower fused ops to kernel calls and plain ATen: from OptimizedGraph to LoweredGraph."""

from qfuse.lower.claims import claim_ops
from qfuse.lower.floats.policy import FloatPolicy, Wishes
from qfuse.lower.lower import lower

__all__ = ["FloatPolicy", "Wishes", "claim_ops", "lower"]
