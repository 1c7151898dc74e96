"""Every recipe is read, and its settings pass the door."""

import pathlib
import runpy

import pytest

from jaxvlm.config import from_config_dict

ARGS = {"finetune": ("folder",), "lora": ("folder",), "relevance": ("folder",)}
RECIPES = sorted((pathlib.Path(__file__).parents[2] / "configs").glob("*.py"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_read(path):
    config = runpy.run_path(str(path))["get_config"](*ARGS.get(path.stem, ()))
    assert from_config_dict(config).data.batch_size > 0
    assert config.is_locked
