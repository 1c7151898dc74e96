"""Devices: meshes, strategies, sharding rules, collectives, process-wide settings, XLA flags."""
