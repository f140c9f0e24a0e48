"""The checks of the lint, one per module."""
