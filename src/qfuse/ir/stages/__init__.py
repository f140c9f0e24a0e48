"""What may pass each stage boundary."""
