"""Quantize, dequantize and choose_qparams written in plain ATen."""
