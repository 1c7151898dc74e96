"""Pure functions of a train step, the training loop, and the callback protocol."""
