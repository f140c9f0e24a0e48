"""What kernels compete for: a linear, a rowwise op, or a linear with the rowwise op behind it."""
