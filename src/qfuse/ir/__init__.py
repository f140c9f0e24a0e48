"""The IR: ops, quantization parameters, views, stages, verifier, text, events."""
