"""What an op says of quantization that changes places with it, one class per family of ops."""
