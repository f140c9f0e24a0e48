"""Fusions: linears with their epilogues, norms and activations with their quantize."""
