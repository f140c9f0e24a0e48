"""Calling a graph with the arguments of the model it came from."""
