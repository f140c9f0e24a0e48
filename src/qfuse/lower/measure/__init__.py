"""Measure the alternatives for the products of a model, instead of predicting their times."""
