"""Propagation of quantize ops up and dequantize ops down through the graph."""
