"""Sweeps: many runs of one recipe with other settings, each an ordinary run in its own folder."""
