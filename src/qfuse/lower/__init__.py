"""Lower fused ops to kernel calls and plain ATen: from OptimizedGraph to LoweredGraph."""

from qfuse.lower.lower import lower

__all__ = ["lower"]
