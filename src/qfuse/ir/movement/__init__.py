"""Movements: how quantization parameters propagate through data movement ops."""
