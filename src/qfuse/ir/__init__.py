"""What a graph is: ops, quantization parameters, views, stages, verifier, text, events."""
