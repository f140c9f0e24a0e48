"""The invariants of each stage boundary."""
