"""Capture: from a user's module or exported program to a CapturedGraph."""

from qfuse.capture.capture import capture

__all__ = ["capture"]
