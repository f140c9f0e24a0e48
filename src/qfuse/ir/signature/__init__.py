"""Calls a graph with the arguments of its source model."""
