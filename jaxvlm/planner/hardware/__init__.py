"""Machines to plan for, the local machine, and the measurement of its rates."""
