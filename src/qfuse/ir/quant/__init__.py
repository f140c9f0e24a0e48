"""Quantization parameters: how quantized values map to real values."""
