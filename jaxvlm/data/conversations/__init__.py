"""Conversations about images: tokenize, pack, collate, and the data set of batches."""
