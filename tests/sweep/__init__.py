"""Sweeps, whose trials are a program that trains nothing."""
