"""Importer of torchao's affine and float8 ops."""
