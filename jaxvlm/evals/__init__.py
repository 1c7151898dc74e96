"""Evaluation metrics: exact match, retrieval, zero-shot classification."""
