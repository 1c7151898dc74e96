"""Evaluation metrics and prediction grids."""
