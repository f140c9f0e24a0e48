"""Kernels that work on whole rows: norms and activations with quantization."""
