"""Measuring: processes, interleaved rounds, statistics."""
