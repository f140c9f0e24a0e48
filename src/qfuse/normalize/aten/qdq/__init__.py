"""Quantize, dequantize and choose_qparams that are written in plain ATen."""
