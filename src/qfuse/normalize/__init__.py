"""From source dialects to one spelling. Takes a CapturedGraph, gives a NormalGraph."""

from qfuse.normalize.normalize import normalize

__all__ = ["normalize"]
