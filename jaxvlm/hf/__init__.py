"""Folders of Hugging Face, PEFT and sentence-transformers: import, export, published models."""
