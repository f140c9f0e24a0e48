"""Importer of PT2E's ``quantized_decomposed`` ops."""
