"""A federation of two sites for Flower's processes: ``--config=flower_recipe.py[:DATA,TOKENIZER]``.

Without an argument its sites are ``flower_site.py``'s, which train nothing.
"""

from __future__ import annotations

import pathlib
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import runs

from jaxvlm.config import default_config


def get_config(arg: str = "") -> Any:
    """``arg``: the data of a site and the folder of the tokenizer, or "": neither."""
    data, _, tokenizer = arg.partition(",")
    config = runs.recipe(pathlib.Path(data)) if data else default_config()
    rounds = 3 if data else 6
    config.federate.sites, config.federate.rounds, config.outer.steps = 2, rounds, 4
    config.steps = config.federate.rounds * config.outer.steps
    config.tokenizer.path = tokenizer
    return config
