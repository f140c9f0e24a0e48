"""Lower fused ops to kernel calls and plain ATen: from OptimizedGraph to LoweredGraph."""

from qfuse.lower.claims import claim_ops
from qfuse.lower.floats.policy import FloatPolicy
from qfuse.lower.lower import lower
from qfuse.lower.measure.measure import Measurer
from qfuse.lower.measure.wishes import Wishes

__all__ = ["FloatPolicy", "Measurer", "Wishes", "claim_ops", "lower"]
