"""Memory of a train step before it is compiled: by formula, and from the step's trace."""
