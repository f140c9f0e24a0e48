"""Siblings become one operation, and equal operations become one."""
