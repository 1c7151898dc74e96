"""Attention kernels for accelerators, in Pallas."""
