"""The experiments: what is measured, and what page it writes."""
