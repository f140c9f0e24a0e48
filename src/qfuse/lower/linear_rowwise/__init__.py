"""A linear and the rowwise op behind it, in one kernel."""
