"""The engine: rules, the only editor of graphs, the driver, and value checks."""
