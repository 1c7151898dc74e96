"""Every recipe is read, and its settings pass the door."""

import pathlib
import runpy

import pytest

from jaxvlm.config import ConfigError, from_config_dict

ARGS = {"finetune": ("folder",), "lora": ("folder",), "relevance": ("folder",)}
RECIPES = sorted((pathlib.Path(__file__).parents[2] / "configs").glob("*.py"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_read(path):
    config = runpy.run_path(str(path))["get_config"](*ARGS.get(path.stem, ()))
    assert from_config_dict(config).data.batch_size > 0
    assert config.is_locked


def test_captions_take_towers_that_are_trained():
    get_config = runpy.run_path(str(RECIPES[0].parent / "captions.py"))["get_config"]
    config = from_config_dict(get_config("here,text=bert,vision=runs/first"))
    assert config.data.train == "here/train.jsonl" and config.optim.frozen == ("vision/*",)
    assert (config.dual.text_checkpoint, config.dual.vision_checkpoint) == ("bert", "runs/first")
    assert from_config_dict(get_config("here,locked=bert")).optim.frozen == ("text/*",)
    with pytest.raises(ConfigError, match="'tower': known: text=FOLDER"):
        get_config("here,tower=x")


def test_embedding_recipes_are_read_by_name():
    get_config = runpy.run_path(str(RECIPES[0].parent / "embedding.py"))["get_config"]
    ranks = {}
    for name in ("clip-b32", "siglip2-so400m", "qwen3-2b", "qwen3-8b"):
        config = from_config_dict(get_config(f"{name},here"))
        assert config.network.checkpoint == "here" and config.data.batch_size == 8192
        ranks[name] = config.network.lora.rank
    assert list(ranks.values()) == [0, 0, 16, 32]
    with pytest.raises(ConfigError, match="qwen4: known: clip-b32"):
        get_config("qwen4")
