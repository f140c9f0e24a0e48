"""Every spelling of a linear becomes ``aten.linear``."""
