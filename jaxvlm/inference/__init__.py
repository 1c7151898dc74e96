"""Inference: generation, embeddings, evaluation, and mining of hard negatives."""
