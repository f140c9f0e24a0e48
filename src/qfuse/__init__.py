"""qfuse: a quantization graph compiler for PyTorch."""
