"""Helpers of the kernels: operand checks, and constants in the layout of the kernels."""
