"""Splits sink below isomorphic ops on all of their parts."""
