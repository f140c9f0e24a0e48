"""qfuse: a quantization graph compiler for PyTorch."""

from qfuse._version import __version__

__all__ = ["__version__"]
