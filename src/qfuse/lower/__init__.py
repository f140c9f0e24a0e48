"""From fused ops to kernel calls and plain ATen. Takes an OptimizedGraph, gives a LoweredGraph."""

from qfuse.lower.lower import lower

__all__ = ["lower"]
