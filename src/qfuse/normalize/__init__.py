"""The normalize stage: from source dialects to canonical ops (CapturedGraph to NormalGraph)."""

from qfuse.normalize.normalize import normalize

__all__ = ["normalize"]
