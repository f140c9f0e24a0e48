"""Ops that no kernel of qfuse runs: backends claim them."""
