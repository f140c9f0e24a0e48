"""Views and copies: one spelling, and those that do nothing are dropped."""
