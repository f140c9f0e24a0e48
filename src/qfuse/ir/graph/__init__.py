"""Graphs between stages: their types, their text, their memory."""
