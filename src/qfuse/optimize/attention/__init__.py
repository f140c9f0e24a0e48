"""Rules for attention with shared key and value heads (GQA)."""
