"""Federated training's coordinator: versions of shared parameters, made of sites' updates."""
