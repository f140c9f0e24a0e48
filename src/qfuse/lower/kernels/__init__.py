"""The registry: one file for each kernel."""
