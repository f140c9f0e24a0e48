"""Activations written as arithmetic become the ops that compute them."""
