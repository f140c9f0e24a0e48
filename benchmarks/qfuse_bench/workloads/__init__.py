"""Graphs and models to measure on."""
