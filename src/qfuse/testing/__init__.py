"""Helpers for tests: hand-built graphs and value comparisons."""
