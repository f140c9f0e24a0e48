"""Operands of products that are quantized at run time, in the spellings of a product."""
