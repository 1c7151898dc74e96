"""What is asked of a plan: a model, its batch, what of it is trained, and on which machine.

A Hugging Face folder, a published model's name or a recipe, each becomes the settings of a run.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any, NamedTuple

from jaxvlm.build import published
from jaxvlm.build.losses import of_vectors
from jaxvlm.build.merge import json_object, merged_model
from jaxvlm.config import ConfigError, LoraConfig, ModelConfig, TrainConfig
from jaxvlm.models.families import any_family
from jaxvlm.models.vlm import num_visual_tokens
from jaxvlm.plan.machine import Machine

TRAINED = ("full", "lora", "connector")
"""What may be asked for: all, adapters on all linear maps, the connector alone."""
OBJECTIVES = {"sft": "next_token", "contrastive": "info_nce"}
_TOWERS = ("vision/*", "decoder/*")
_VOCABULARY = 64


class Question(NamedTuple):
    """A run that is to be planned."""

    name: str
    """Of the model, or the recipe."""
    config: TrainConfig
    """Of the run, its model's dims filled in; mesh and strategy are what is searched."""
    machine: Machine
    pictures: int
    """Of a row."""
    patches: int
    """Of a row, where pictures come packed."""
    recipe: str = ""
    """``FILE[:arg]``, where it is one."""
    samples: int = 0
    """Rows of an epoch; 0: not known."""
    price: float = 0.0
    """Of a device for an hour; 0: not known."""
    assumed: tuple[str, ...] = ()
    """What nobody said."""
    given: TrainConfig = TrainConfig()
    """What overrides are put on: the recipe, or all defaults."""

    @property
    def rows(self) -> int:
        """Of a batch."""
        return self.config.data.batch_size

    @property
    def length(self) -> int:
        """Tokens of a row."""
        return self.config.data.max_length


class Asked(NamedTuple):
    """What the command line says besides; zeros and "" leave it to the recipe."""

    batch: int = 0
    length: int = 0
    pictures: int = -1
    patches: int = 0
    train: str = ""
    objective: str = ""
    samples: int = 0
    price: float = 0.0


_NOTHING = Asked()


def ask(
    model: str, recipe: TrainConfig | None, machine: Machine, asked: Asked = _NOTHING
) -> Question:
    """The question that a command line asks.

    Args:
        model: a Hugging Face folder or a published model's name; of a recipe its file.
        recipe: its settings, where it is one.
        machine: what it would run on.
        asked: what is asked besides.

    Raises:
        ConfigError: no such model, or what can't be asked of it.
    """
    _check(asked)
    notes: list[str] = []
    if recipe is None:
        config = _of_model(model, machine)
    else:
        config = _of_recipe(recipe, notes)
    config = _trained(config, asked)
    if why := unknown(config):
        raise ConfigError(
            f"{model}: {why} can't be planned yet; jaxvlm train --dry_run compiles the step and "
            "says what it needs"
        )
    data = dataclasses.replace(
        config.data,
        max_length=asked.length or config.data.max_length,
        batch_size=asked.batch or (config.data.batch_size if recipe else machine.devices),
        max_images=asked.pictures if asked.pictures > 0 else config.data.max_images,
        max_patches=asked.patches or config.data.max_patches,
    )
    if recipe is None:
        notes += [] if asked.batch else [f"a batch of {data.batch_size} rows, one a device"]
        notes += [] if asked.length else [f"rows of {data.max_length} tokens"]
    config = dataclasses.replace(config, data=data)
    pictures, patches = _pictures(config, asked, recipe is not None, notes)
    if recipe is None:
        data = dataclasses.replace(data, max_images=max(1, pictures), max_patches=patches)
        config = dataclasses.replace(config, data=data)
    return Question(
        model, config, machine, pictures, patches, model if recipe else "",
        asked.samples, asked.price, tuple(notes), recipe or TrainConfig(),
    )  # fmt: skip


def unknown(config: TrainConfig) -> str:
    """What of a run's settings no plan knows; "" where all are known."""
    settings = {
        f"a loss of vectors (config.loss={config.loss!r})": of_vectors(config),
        f"a tower on devices of its own (config.tower.devices={config.tower.devices})": (
            config.tower.devices != 0
        ),
        f"visual tokens that are made in chunks (config.cache.chunk={config.cache.chunk})": (
            config.cache.chunk > 0
        ),
    }
    return next((name for name, is_set in settings.items() if is_set), "")


def _check(asked: Asked) -> None:
    if asked.train not in ("", *TRAINED):
        raise ConfigError(f"--train={asked.train}; known: {', '.join(TRAINED)}")
    if asked.objective not in ("", *OBJECTIVES):
        raise ConfigError(f"--objective={asked.objective}; known: {', '.join(OBJECTIVES)}")
    least: dict[str, float] = {"batch": asked.batch, "seq": asked.length, "patches": asked.patches}
    least |= {"samples": asked.samples, "price": asked.price}
    for name, value in least.items():
        if value < 0:
            raise ConfigError(f"--{name}={value:g}: it must be above 0")


def _of_model(name: str, machine: Machine) -> TrainConfig:
    """Default settings with the dims of a folder or of a published model."""
    found, where = _described(name, "--model")
    model = any_family(found, where).config_from_hf(found)
    if not isinstance(model, ModelConfig):
        raise ConfigError(
            f"--model={name} is a dual encoder, which can't be planned yet; jaxvlm train --dry_run "
            "compiles the step and says what it needs"
        )
    dtype = "float32" if machine.platform == "cpu" else "bfloat16"
    config = TrainConfig(model=dataclasses.replace(model, dtype=dtype, checkpoint=_folder(name)))
    return dataclasses.replace(config, data=dataclasses.replace(config.data, max_length=2048))


def _folder(name: str) -> str:
    return name if pathlib.Path(name).expanduser().is_dir() else ""


def _of_recipe(recipe: TrainConfig, notes: list[str]) -> TrainConfig:
    """``recipe`` with its checkpoint's dims."""
    model = recipe.model
    if model.checkpoint and recipe.encoder != "dual":
        found, where = _described(model.checkpoint, "config.model.checkpoint")
        made = any_family(found, where).config_from_hf(found)
        if not isinstance(made, ModelConfig):
            raise ConfigError(f"config.model.checkpoint={model.checkpoint} is a dual encoder")
        model = merged_model(model, made)
        if model.lora.checkpoint:
            recipe = _adapted(dataclasses.replace(recipe, model=model), found)
            model = recipe.model
    elif model.lora.checkpoint:
        raise ConfigError(
            f"config.model.lora.checkpoint={model.lora.checkpoint} adapts a Hugging Face model; "
            "set config.model.checkpoint to its folder"
        )
    if not model.decoder.vocab_size:
        most = recipe.tokenizer.vocab_size
        notes.append(f"a vocabulary of {most}, the most that its tokenizer may have")
        size = -(-most // _VOCABULARY) * _VOCABULARY
        model = dataclasses.replace(
            model, decoder=dataclasses.replace(model.decoder, vocab_size=size)
        )
    return dataclasses.replace(recipe, model=model)


def _adapted(recipe: TrainConfig, found: dict[str, Any]) -> TrainConfig:
    """``recipe`` with the rank and targets that its adapters' folder says."""
    from jaxvlm.build import adapters, pretrained  # readers of weights, which other plans need not

    name = recipe.model.checkpoint
    folder = pathlib.Path(name).expanduser()
    source = pretrained.Source(folder, folder, found, any_family(found, name))
    return adapters.with_adapter(recipe, source, None)


def _described(name: str, what: str) -> tuple[dict[str, Any], str]:
    """(config.json, where it is from) of a folder, or of a published model by its name."""
    folder = pathlib.Path(name).expanduser()
    if folder.is_dir():
        return json_object(folder / "config.json", f"{what} takes a checkpoint's folder"), name
    if name in published.names():
        return dict(published.published(name)), name
    known = ", ".join(published.names())
    raise ConfigError(
        f"{what}={name}: no such folder (nothing is downloaded for a plan), nor a published model "
        f"that is known: {known}; a recipe ends in .py"
    )


def _trained(config: TrainConfig, asked: Asked) -> TrainConfig:
    """``config`` with what ``--train`` and ``--objective`` say."""
    if asked.objective and of_vectors(config) != (asked.objective == "contrastive"):
        config = dataclasses.replace(config, loss=OBJECTIVES[asked.objective])
    lora, frozen = config.model.lora, config.optim.frozen
    if asked.train == "lora":
        lora, frozen = (lora if lora.rank else LoraConfig(rank=16, alpha=32.0)), ()
    elif asked.train:
        lora, frozen = LoraConfig(), _TOWERS if asked.train == "connector" else ()
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, lora=lora),
        optim=dataclasses.replace(config.optim, frozen=frozen),
    )


def _pictures(
    config: TrainConfig, asked: Asked, is_recipe: bool, notes: list[str]
) -> tuple[int, int]:
    """(pictures, patches) of a row."""
    model, length = config.model, config.data.max_length
    a_token = model.connector.merge**2
    if not model.vision.packed:
        most = length // num_visual_tokens(model)
        if asked.patches:
            raise ConfigError(f"--patches={asked.patches}: this model's pictures have one size")
        if asked.pictures > most:
            raise ConfigError(
                f"--images={asked.pictures}: rows of {length} tokens have room for {most} "
                f"({num_visual_tokens(model)} tokens each)"
            )
        if asked.pictures >= 0:
            return asked.pictures, 0
        if is_recipe:
            return min(config.data.max_images, most), 0
        pictures = max(min(1, most), most // 2)
        notes.append(f"{pictures} x {num_visual_tokens(model)} of a row's tokens are pictures'")
        return pictures, 0
    patches = asked.patches or config.data.max_patches
    if patches > length * a_token:
        raise ConfigError(
            f"--patches={patches}: rows of {length} tokens have room for {length * a_token}"
        )
    pictures = asked.pictures if asked.pictures >= 0 else config.data.max_images
    if not is_recipe and asked.pictures < 0:
        pictures = 2
    if not pictures:
        return 0, 0
    if not patches:
        notes.append("pictures fill half of a row")
        patches = length // 2 * a_token
    return pictures, patches
