"""Kernels against those of torch."""
