"""From a user's model to a graph. Takes a module or a program, gives a CapturedGraph."""

from qfuse.capture.capture import capture

__all__ = ["capture"]
