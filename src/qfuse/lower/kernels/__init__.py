"""The kernel registry, with one file per kernel."""
