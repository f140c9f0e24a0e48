"""Rules on ATen: one spelling for each operation, and quantization written in plain ATen."""
