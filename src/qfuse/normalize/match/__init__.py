"""Helpers of the rules of this stage: matching, not rewriting."""
