"""A run of a minute for two processes under SLURM: ``--config=slurm_recipe.py:DATA[:FAULT]``.

``FAULT``: "bug" makes SIGALRM an exception in the second process, "missing" has it read no file.
"""

import os
import pathlib
import signal
from typing import Any

from tests import runs


def _raise(*_: Any) -> None:
    raise RuntimeError("a bug in the second process")


def get_config(arg: str) -> Any:
    """``arg``: the folder of the data, and a fault."""
    folder, _, fault = arg.partition(":")
    config = runs.recipe(pathlib.Path(folder) / "data.jsonl")
    config.steps, config.checkpoint.every = 120, 25
    config.mesh.data = -1
    config.model.decoder.dropout = 0.1
    if os.environ.get("SLURM_PROCID") == "1":
        if fault == "bug":
            signal.signal(signal.SIGALRM, _raise)
        if fault == "missing":
            config.data.train = str(pathlib.Path(folder) / "missing.jsonl")
    return config
