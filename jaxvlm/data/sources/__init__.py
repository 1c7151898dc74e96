"""Readers of data files: formats of conversations and of pairs, and file types."""
