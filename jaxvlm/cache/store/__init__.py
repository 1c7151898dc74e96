"""Tokens in host memory and on disk: tiers, file format, codecs, maintenance."""
