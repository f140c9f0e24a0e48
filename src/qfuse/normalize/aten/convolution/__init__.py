"""Convolutions: one form of their padding."""
