"""Lint of the placement of quantization."""
