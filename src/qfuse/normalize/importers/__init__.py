"""Importers: each source dialect of quantization becomes the canonical ops."""
