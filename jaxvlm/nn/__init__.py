"""Layers, and parameters whose dims have names: attention, MLPs, experts, norms, dropout, RoPE."""
