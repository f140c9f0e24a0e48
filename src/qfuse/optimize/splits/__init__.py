"""Splits move below the operations that treat all parts alike."""
