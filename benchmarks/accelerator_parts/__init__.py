"""The parts of ``benchmarks/accelerator.py``; each module is imported in a part's own process."""


class Unavailable(Exception):
    """Why a part has no figures on this machine."""
