"""Quantize moves up and dequantize moves down through the graph."""
