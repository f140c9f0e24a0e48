"""What kernels compete for: a linear, a rowwise op, or a linear followed by a rowwise op."""
