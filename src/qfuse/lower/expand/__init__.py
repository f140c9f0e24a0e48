"""Expansion to ATen of ops that no kernel accepts."""
