"""Movements: how quantization parameters follow data that moves."""
