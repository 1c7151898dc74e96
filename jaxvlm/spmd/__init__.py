"""A model and its train step laid over a mesh: shardings, runners, ``jax.jit``."""
