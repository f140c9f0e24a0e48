"""Helpers for the rules of this stage: matching, without rewriting."""
