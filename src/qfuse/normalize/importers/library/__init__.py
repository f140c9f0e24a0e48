"""Quantized products of libraries: ATen's, oneDNN's and torchao's ops with packed weights."""
