"""A run of a minute for two processes under SLURM: ``--config=slurm_recipe.py:DATA[:FAULT]``.

``FAULT``: "bug" makes SIGALRM an exception in the second process, "missing" has it read no file,
and "slow" makes every step a second longer.
"""

import os
import pathlib
import signal
import time
from typing import Any

from jaxvlm.parallel.distributed import processes
from tests import runs


def _raise(*_: Any) -> None:
    raise RuntimeError("a bug in the second process")


def _slow_down() -> None:
    check = processes.should_stop  # which the loop calls at each step

    def slowly(step: int) -> bool:
        time.sleep(1)
        return check(step)

    processes.should_stop = slowly


def get_config(arg: str) -> Any:
    """``arg``: the folder of the data, and a fault."""
    folder, _, fault = arg.partition(":")
    config = runs.recipe(pathlib.Path(folder) / "data.jsonl")
    config.steps, config.checkpoint.every = 120, 25
    config.mesh.data = -1
    config.model.decoder.dropout = 0.1
    if fault == "slow":
        _slow_down()
    if os.environ.get("SLURM_PROCID") == "1":
        if fault == "bug":
            signal.signal(signal.SIGALRM, _raise)
        if fault == "missing":
            config.data.train = str(pathlib.Path(folder) / "missing.jsonl")
    return config
