"""Losses: sums over examples with weights known before the forward pass."""
