"""Blocks that a graph repeats: find them, compile them once, run them as a chain."""
