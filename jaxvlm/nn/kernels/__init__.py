"""Attention kernels for accelerators, in Pallas and of cuDNN."""

SAVED = "attention_kernel"
"""Name (``jax.ad_checkpoint.checkpoint_name``) of what a kernel's backward pass reads besides its
inputs: the output, and statistics of the softmax. ``remat="dots"`` saves it (``nn/stack.py``)."""
