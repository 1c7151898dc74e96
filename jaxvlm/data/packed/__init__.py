"""Packed sets, of conversations or of pairs: their files, arrays, images, and what is checked."""
