"""Benchmarks of the kernels against torch's."""
