"""Products in float instead of on a quantized kernel, where that is faster."""
