"""Ops that no kernel takes are expanded to ATen."""
