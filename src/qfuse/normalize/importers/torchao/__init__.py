"""torchao's affine and float8 ops."""
