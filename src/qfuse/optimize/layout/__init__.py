"""Rules for the memory layout of activations."""
