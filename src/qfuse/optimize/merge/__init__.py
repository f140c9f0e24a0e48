"""Merging: sibling ops become one op, and equal ops become one."""
