"""Integer matrix products with scales become linears of dequantized operands."""
