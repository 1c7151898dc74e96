"""Training runs that are killed at drawn moments, and go on to the bits of a run that was not."""
