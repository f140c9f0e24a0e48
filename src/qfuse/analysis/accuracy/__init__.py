"""Accuracy per layer of a quantized model against its float model."""
