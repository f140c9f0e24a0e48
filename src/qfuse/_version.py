"""The package version: the single source for the build and the code."""

__version__ = "0.1.0.dev0"
