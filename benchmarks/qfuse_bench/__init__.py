"""Benchmarks of qfuse against its peers, and the demo."""
