"""Inputs of the host cache and the disk store that come from a run."""

from __future__ import annotations

import pathlib
from typing import Any, NamedTuple

import numpy as np

from jaxvlm.config import Config
from jaxvlm.data.page_allocation import NoPages, PageAllocation
from jaxvlm.spmd.model import Model


class CacheInputs(NamedTuple):
    """The parts of a run that its host cache and its disk store use."""

    config: Config
    model: Model
    dataset: Any
    """A Dataset, or a PairDataset."""
    rows: np.ndarray
    """i64[sequences]: indices of this process's sequences in the global batch, ascending."""
    pages: PageAllocation | NoPages | None
    """Pages of the images on the devices and in host memory; ``None``: nothing is cached."""
    learns: bool
    """Whether the vision encoder is trained."""
    workdir: pathlib.Path | None
    """Folder of the run; ``None``: it writes no files."""
