"""Importers: rules that turn the quantization ops of each source dialect into canonical ops."""
