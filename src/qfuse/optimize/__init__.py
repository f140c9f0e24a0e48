"""From one spelling of everything to fused ops. Takes a NormalGraph, gives an OptimizedGraph."""

from qfuse.optimize.rewrite_names import ATTENTION, FUSING, rewrite_names
from qfuse.optimize.schedule import optimize

__all__ = ["ATTENTION", "FUSING", "optimize", "rewrite_names"]
