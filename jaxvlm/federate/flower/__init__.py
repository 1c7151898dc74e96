"""Flower as the transport of a federation: it carries bytes, and knows neither model nor rule."""
