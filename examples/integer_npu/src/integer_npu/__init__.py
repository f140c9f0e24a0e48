"""A qfuse backend for a fictional accelerator that computes with integers only.

:data:`backend` is what the entry point ``qfuse.backends`` names. :func:`save` writes a compiled
model to a file, and :func:`load` reads it without the model.
"""

from integer_npu.artifact import NpuRunner, load, save
from integer_npu.backend import IntegerNpu, backend

__all__ = ["IntegerNpu", "NpuRunner", "backend", "load", "save"]
