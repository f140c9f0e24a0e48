"""Rules for quantized images."""
