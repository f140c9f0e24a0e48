"""From one spelling of everything to fused ops. Takes a NormalGraph, gives an OptimizedGraph."""

from qfuse.optimize.schedule import optimize

__all__ = ["optimize"]
