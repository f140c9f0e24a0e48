"""Measuring qfuse against its peers, and the demo."""
