"""Helpers for the rules of this stage: matching and cost estimates, without rewriting."""
