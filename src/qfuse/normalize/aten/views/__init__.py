"""Views and copies: rules for one spelling, which also drop those without effect."""
