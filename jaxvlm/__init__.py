"""jaxvlm: train, fine-tune and embed with vision-language models in JAX, on any mesh."""

__version__ = "0.1.0"
