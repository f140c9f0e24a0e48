"""Patterns of plain ATen code that a fused op of qfuse can replace."""
