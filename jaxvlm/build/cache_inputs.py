"""What the caches outside of the devices use of a run."""

from __future__ import annotations

import pathlib
from typing import Any, NamedTuple

import numpy as np

from jaxvlm.build.model import Model
from jaxvlm.config import TrainConfig
from jaxvlm.data.slots import Slots, Unpaged


class CacheInputs(NamedTuple):
    """A run, as far as its host cache and its store need it."""

    config: TrainConfig
    model: Model
    dataset: Any
    """A Dataset, or a PairDataset."""
    rows: np.ndarray
    """i64[rows]: this process's rows of the global batch, ascending."""
    slots: Slots | Unpaged | None
    """Where visual tokens are kept; ``None``: nowhere."""
    learns: bool
    """Whether the vision encoder is trained."""
    workdir: pathlib.Path | None
