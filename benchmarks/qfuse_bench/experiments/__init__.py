"""The experiments, and the pages that they generate."""
