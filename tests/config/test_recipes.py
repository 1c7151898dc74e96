"""Every recipe is read, as a dataclass or a ConfigDict, and its settings are checked."""

import pathlib
import runpy

import pytest
from absl import flags

from jaxvlm.cli.common import define_recipe
from jaxvlm.config import (
    Config,
    ConfigError,
    OptimConfig,
    from_config_dict,
    to_config_dict,
)

ARGS = {
    "finetune": ("folder",),
    "kv_cache": ("folder",),
    "lora": ("folder",),
    "relevance": ("folder",),
}
RECIPES = sorted((pathlib.Path(__file__).parents[2] / "configs").glob("*.py"))
AS_DATACLASS = """
from jaxvlm.config import Config, MeshConfig, OptimConfig
def get_config(arg="3"):
    return Config(steps=int(arg), optim=OptimConfig(warmup_steps=100), mesh=MeshConfig(fsdp=2))
"""
AS_CONFIG_DICT = """
from jaxvlm.config import default_config
def get_config(arg="3"):
    config = default_config()
    config.steps, config.optim.warmup_steps, config.mesh.fsdp = int(arg), 100, 2
    return config
"""


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_read(path):
    config = runpy.run_path(str(path))["get_config"](*ARGS.get(path.stem, ()))
    assert from_config_dict(config).data.batch_size > 0
    assert isinstance(config, Config) or config.is_locked


@pytest.fixture(params=[AS_DATACLASS, AS_CONFIG_DICT], ids=["dataclass", "ConfigDict"])
def flag_of(request, tmp_path):
    """``--config`` and overrides -> the flag, of a recipe of either kind."""
    path = tmp_path / "recipe.py"
    path.write_text(request.param)

    def parsed(*overrides, arg=":7", default=False):
        values = flags.FlagValues()
        recipe = f"{path}{arg}"
        argv = [*([] if default else [f"--config={recipe}"]), *overrides]
        define_recipe(values, argv, "The recipe.", recipe if default else None)
        values(["jaxvlm", *argv])
        return values["config"]

    return parsed


def test_overrides_of_a_recipe_of_either_kind(flag_of):
    flag = flag_of(
        "--config.optim.warmup_steps=0.5",
        "--config.epochs=2",
        "--config.optim.frozen=('vision/*',)",
        "--config.data.flip",
        "--config.model.vision.width=128",
    )
    config = from_config_dict(flag.value)
    assert (config.steps, config.epochs, config.mesh.fsdp) == (7, 2.0, 2)
    assert config.optim.warmup_steps == 0.5 and config.optim.frozen == ("vision/*",)
    assert config.data.flip and config.model.vision.width == 128
    assert set(flag.override_values) == {
        *("optim.warmup_steps", "epochs", "optim.frozen", "data.flip", "model.vision.width")
    }
    with pytest.raises(KeyError, match="widht"):
        flag_of("--config.model.vision.widht=128")
    with pytest.raises(flags.IllegalFlagValueError, match="width"):
        flag_of("--config.model.vision.width=wide")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.options.a=2", r"config\.optim has no group of settings 'options'; known: b1, b2"),
        ("data.pairs.options.a.b=2", r"config\.data\.pairs has no group of settings 'options'"),
        ("optm.eps=2", r"config has no group of settings 'optm'; did you mean 'optim'\?"),
        ("optim.b1.options.x=1", r"config\.optim\.b1 is 0\.9, and no group of settings"),
    ],
)
def test_a_group_that_there_is_not_is_named(flag_of, override, message):
    with pytest.raises(flags.IllegalFlagValueError, match=message):
        flag_of(f"--config.{override}")


def test_a_recipe_that_is_the_default(flag_of):
    flag = flag_of("--config.steps=9", default=True)
    assert from_config_dict(flag.value).steps == 9
    assert from_config_dict(flag.value).optim.warmup_steps == 100


def test_both_kinds_give_the_same_settings(tmp_path):
    made = []
    for text in (AS_DATACLASS, AS_CONFIG_DICT):
        (tmp_path / "recipe.py").write_text(text)
        made.append(runpy.run_path(str(tmp_path / "recipe.py"))["get_config"]())
    values = [to_config_dict(from_config_dict(config)) for config in made]
    assert values[0].to_json() == values[1].to_json()
    types = [{k: type(v) for k, v in value.optim.items()} for value in values]
    assert types[0] == types[1]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("steps", "3", r"config\.steps must be int, not '3'"),
        ("mesh", 4, r"config\.mesh is a group of settings, not 4"),
        ("mesh", OptimConfig(), r"config\.mesh\.\w+ is not a setting; known: data"),
    ],
)
def test_a_dataclass_is_checked_as_a_config_dict_is(name, value, message):
    config = Config()
    object.__setattr__(config, name, value)  # replace would be refused by the types of tests
    with pytest.raises(ConfigError, match=message):
        from_config_dict(config)


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
