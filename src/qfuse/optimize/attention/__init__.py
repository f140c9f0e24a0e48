"""Attention over shared heads."""
