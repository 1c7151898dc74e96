"""What is asked of a plan: a model, its batch, what of it is trained, and on which machine.

A Hugging Face folder, a published model's name or a recipe, each becomes the settings of a run.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from typing import Any, NamedTuple

from jaxvlm.build import published
from jaxvlm.build.losses import of_vectors
from jaxvlm.build.merge import json_object, merged_model
from jaxvlm.config import (
    ConfigError,
    DualConfig,
    LoraConfig,
    ModelConfig,
    PairLossConfig,
    TrainConfig,
)
from jaxvlm.models.families import any_family
from jaxvlm.models.vlm import num_visual_tokens
from jaxvlm.plan import pairs
from jaxvlm.plan.absent import Rows
from jaxvlm.plan.machine import Machine
from jaxvlm.plan.pairs import Pairing

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
    """Of a row, or of an example."""
    patches: int
    """Of a row, or of an example, where pictures come packed."""
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
    pairs: Pairing | None = None
    """What an example is; ``None``: rows are trained on."""

    @property
    def rows(self) -> int:
        """Of a batch; of pairs, examples."""
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
        said = asked.length or of_vectors(config)  # of pairs it is said below
        notes += [] if said else [f"rows of {data.max_length} tokens"]
    config = dataclasses.replace(config, data=data)
    row = _row(config, asked, recipe is not None, notes)
    if recipe is None and config.encoder == "vlm":
        data = dataclasses.replace(data, max_images=max(1, row.pictures), max_patches=row.patches)
        config = dataclasses.replace(config, data=data)
    pairing = _pairing(config, row, notes) if of_vectors(config) else None
    return Question(
        model, config, machine, row.pictures, row.patches, model if recipe else "",
        asked.samples, asked.price, tuple(notes), recipe or TrainConfig(),
        pairing,
    )  # fmt: skip


def unknown(config: TrainConfig) -> str:
    """What of a run's settings no plan knows; "" where all are known."""
    settings = {
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
        if not 0 <= value < math.inf:
            raise ConfigError(f"--{name}={value:g}: it must be above 0")
    if asked.pictures < -1:
        raise ConfigError(f"--images={asked.pictures}: it must be at least 0")


def _of_model(name: str, machine: Machine) -> TrainConfig:
    """Default settings with the dims of a folder or of a published model."""
    found, where = _described(name, "--model")
    model = any_family(found, where).config_from_hf(found)
    dtype = "float32" if machine.platform == "cpu" else "bfloat16"
    made = dataclasses.replace(model, dtype=dtype, checkpoint=_folder(name))
    if isinstance(made, DualConfig):
        config = TrainConfig(encoder="dual", dual=made, **_usual(made))
        length = made.text.max_length if "text" in made.towers else 0
    else:
        config, length = TrainConfig(model=made), 2048
    return dataclasses.replace(config, data=dataclasses.replace(config.data, max_length=length))


def _usual(model: DualConfig) -> dict[str, Any]:
    """The loss that a published dual encoder was trained by: SigLIP's, CLIP's, or of texts."""
    if model.has_bias:
        return {"loss": "sigmoid"}
    if model.towers != ("vision", "text"):
        return {"loss": "info_nce"}
    both = ("query_to_document", "document_to_query")
    clip = PairLossConfig(temperature=0.0, directions=both, partition="each")
    return {"loss": "info_nce", "pair_loss": clip}


def _folder(name: str) -> str:
    return name if pathlib.Path(name).expanduser().is_dir() else ""


def _of_recipe(recipe: TrainConfig, notes: list[str]) -> TrainConfig:
    """``recipe`` with its checkpoint's dims."""
    if recipe.encoder == "dual":
        return dataclasses.replace(recipe, dual=_of_dual(recipe, notes))
    model = recipe.model
    if model.checkpoint:
        found, where = _described(model.checkpoint, "config.model.checkpoint")
        made = any_family(found, where).config_from_hf(found)
        if not isinstance(made, ModelConfig):
            raise ConfigError(
                f"config.model.checkpoint={model.checkpoint} is a dual encoder: set "
                "config.encoder='dual' and config.dual.checkpoint"
            )
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
        decoder = dataclasses.replace(model.decoder, vocab_size=_vocabulary(recipe, notes))
        model = dataclasses.replace(model, decoder=decoder)
    return dataclasses.replace(recipe, model=model)


def _vocabulary(recipe: TrainConfig, notes: list[str]) -> int:
    """Of a tokenizer that is made of the data."""
    most = recipe.tokenizer.vocab_size
    notes.append(f"a vocabulary of {most}, the most that its tokenizer may have")
    return -(-most // _VOCABULARY) * _VOCABULARY


def _of_dual(recipe: TrainConfig, notes: list[str]) -> DualConfig:
    """A recipe's dual encoder with the dims of its checkpoint, or of its towers'."""
    from jaxvlm.build import dual as duals  # readers of weights, which other plans need not

    def described(field: str) -> DualConfig:
        name, where = getattr(recipe.dual, field), f"config.dual.{field}"
        found, source = _described(name, where)
        made = any_family(found, source).config_from_hf(found)
        if not isinstance(made, DualConfig):
            raise ConfigError(f"{where}={name} is no dual encoder, nor a tower of one")
        return made

    model = recipe.dual
    if model.checkpoint:
        return duals.merged(model, described("checkpoint"))
    towers: dict[str, Any] = {}
    for name in model.towers:
        if name == "vision" and (vision := duals.vision_of_run(recipe)):
            towers[name] = vision
        elif getattr(model, f"{name}_checkpoint"):
            theirs = getattr(described(f"{name}_checkpoint"), name)
            towers[name] = duals.with_tower(getattr(model, name), theirs, name)
    model = dataclasses.replace(model, **towers)
    if "text" in model.towers and not model.text.vocab_size:
        text = dataclasses.replace(model.text, vocab_size=_vocabulary(recipe, notes))
        model = dataclasses.replace(model, text=text)
    return model


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
    is_dual = config.encoder == "dual"
    if is_dual and (asked.objective == "sft" or not (asked.objective or of_vectors(config))):
        raise ConfigError(
            f"{'--objective=sft' if asked.objective else f'config.loss={config.loss!r}'}: a dual "
            "encoder makes vectors, and predicts no token: --objective=contrastive"
        )
    if is_dual and asked.train == "connector":
        raise ConfigError("--train=connector: a dual encoder has none; full or lora would do")
    if asked.objective and of_vectors(config) != (asked.objective == "contrastive"):
        config = dataclasses.replace(config, loss=OBJECTIVES[asked.objective])
    lora, frozen = config.network.lora, config.optim.frozen
    if asked.train == "lora":
        lora, frozen = (lora if lora.rank else LoraConfig(rank=16, alpha=32.0)), ()
    elif asked.train:
        lora, frozen = LoraConfig(), _TOWERS if asked.train == "connector" else ()
    return with_network(
        dataclasses.replace(config, optim=dataclasses.replace(config.optim, frozen=frozen)),
        dataclasses.replace(config.network, lora=lora),
    )


def with_network(config: TrainConfig, network: ModelConfig | DualConfig) -> TrainConfig:
    """A run with another model of the same kind."""
    if isinstance(network, DualConfig):
        return dataclasses.replace(config, dual=network)
    return dataclasses.replace(config, model=network)


def _row(config: TrainConfig, asked: Asked, is_recipe: bool, notes: list[str]) -> Rows:
    """What a row has room for; of pairs, a document's, and a dual encoder's picture besides."""
    if config.encoder == "dual":
        return _encoded(config, asked)
    pictures, patches = _pictures(config, asked, is_recipe, notes)
    return Rows(config.data.max_length, pictures, patches)


def _encoded(config: TrainConfig, asked: Asked) -> Rows:
    """The text and the picture of a dual encoder's example."""
    model, length = config.dual, config.data.max_length
    has = 1 if "vision" in model.towers else 0
    if asked.pictures > has:
        raise ConfigError(
            f"--images={asked.pictures}: an example of this model has "
            f"{'one picture' if has else 'texts alone'}"
        )
    if asked.length > (most := model.text.max_length):
        raise ConfigError(f"--seq={asked.length}: this model's texts have at most {most} tokens")
    if asked.patches and not (has and model.vision.packed):
        raise ConfigError(f"--patches={asked.patches}: this model's pictures have one size")
    vision = model.vision
    usual = config.data.max_patches or (vision.image_size // vision.patch_size) ** 2
    patches = asked.patches or usual if vision.packed else 0
    has = has if asked.pictures else 0
    return Rows(min(length, most) if "text" in model.towers else 0, has, patches * has)


def _pairing(config: TrainConfig, row: Rows, notes: list[str]) -> Pairing:
    """What an example of a run on pairs is, as far as settings say it.

    Raises:
        ConfigError: settings that do not go with pairs.
    """
    if config.microbatches > 1:
        raise ConfigError(
            f"config.microbatches={config.microbatches} does not go with config.loss="
            f"{config.loss!r}: the parts of a batch are the chunks of config.grad_cache"
        )
    own = config.data.pairs
    lengths = [own.max_query_length or row.length, own.max_document_length or row.length]
    query, document = (Rows(min(row.length, n)) for n in lengths)
    if row.pictures and config.encoder == "dual":
        query = row._replace(length=0)
    elif row.pictures:
        document = row._replace(length=document.length)
    document = document if document.length else query  # pictures alone
    notes.append(f"queries of {_said(query)}, documents of {_said(document)}")
    return Pairing(query, document, pairs.how(config), 1 + max(0, own.max_negatives))


def _said(rows: Rows) -> str:
    words = [f"{rows.length} tokens"] if rows.length else []
    words += [f"{rows.pictures} picture{'s' * (rows.pictures > 1)}"] if rows.pictures else []
    return " with ".join(words)


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
