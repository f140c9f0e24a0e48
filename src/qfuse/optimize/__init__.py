"""From one spelling of everything to fused ops. Takes a NormalGraph, gives an OptimizedGraph."""

from qfuse.optimize.names import FUSING, rewrite_names
from qfuse.optimize.schedule import optimize

__all__ = ["FUSING", "optimize", "rewrite_names"]
