"""Queries and documents of embedding models: examples, sampler, collators, data set."""
