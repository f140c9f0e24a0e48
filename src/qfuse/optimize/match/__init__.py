"""Helpers of the rules of this stage: matching and prices, not rewriting."""
