"""Federated training's sites: ordinary runs that exchange their parameters with a coordinator."""
