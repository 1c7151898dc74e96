"""A planning request: a model, its batch, what is trained, and the machine.

A Hugging Face folder, a published model's name and a recipe are all converted to a run's settings.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from typing import Any, NamedTuple

import numpy as np

from jaxvlm.config import (
    Config,
    ConfigError,
    DualConfig,
    Extension,
    LoraConfig,
    LossConfig,
    ModelConfig,
    PairLossConfig,
)
from jaxvlm.config.merge import json_object, merged_model
from jaxvlm.hf import model_zoo
from jaxvlm.hf.families import any_family, config_reader, family_of
from jaxvlm.losses.registry import loss_setting, trains_embeddings
from jaxvlm.models.vlm import num_visual_tokens
from jaxvlm.planner.hardware.machine import Machine
from jaxvlm.planner.request import pairs
from jaxvlm.planner.request.abstract_devices import BatchShape
from jaxvlm.planner.request.held_dtypes import Held
from jaxvlm.planner.request.pairs import PairShapes
from jaxvlm.train import island_checks

TRAINED = ("full", "lora", "connector")
"""Values of ``--train``: all parameters, LoRA adapters on all linear maps, or the connector alone.
"""
OBJECTIVES = {"sft": "next_token", "contrastive": "info_nce"}
_TOWERS = ("vision/*", "decoder/*")
_VOCABULARY = 64


class PlanRequest(NamedTuple):
    """A run to plan."""

    name: str
    """The model's name, or the recipe's file."""
    config: Config
    """Settings of the run, with its model's dims; mesh, but for its islands, and strategy are
    searched."""
    machine: Machine
    images: int
    """Images of a packed sequence, or of an example."""
    patches: int
    """Patches of a packed sequence, or of an example, for models with packed images."""
    recipe: str = ""
    """``FILE[:arg]``; "" if the request is no recipe."""
    samples: int = 0
    """Packed sequences, or examples, of an epoch; 0: unknown."""
    price: float = 0.0
    """Price of a device per hour; 0: unknown."""
    assumed: tuple[str, ...] = ()
    """What was not given and had to be assumed, as text."""
    given: Config = Config()
    """Settings that overrides are relative to: the recipe's, or all defaults."""
    pairs: PairShapes | None = None
    """Shapes of an example; ``None``: training is not on pairs."""
    file_dtypes: Held = ()
    """Dtypes of the parameters in the files that they are read from."""

    @property
    def rows(self) -> int:
        """Packed sequences of a batch; when training on pairs, examples."""
        return self.config.data.batch_size

    @property
    def length(self) -> int:
        """Tokens of a packed sequence."""
        return self.config.data.max_length


class RequestFlags(NamedTuple):
    """The command line's flags; zeros and "" leave a value to the recipe."""

    batch: int = 0
    length: int = 0
    images: int = -1
    patches: int = 0
    train: str = ""
    objective: str = ""
    samples: int = 0
    price: float = 0.0


_NOTHING = RequestFlags()


def plan_request(
    model: str, recipe: Config | None, machine: Machine, flags: RequestFlags = _NOTHING
) -> PlanRequest:
    """Make the planning request of a command line.

    Args:
        model: a Hugging Face folder or a published model's name; for a recipe its file.
        recipe: the recipe's settings; ``None`` if ``model`` is no recipe.
        machine: the machine to plan for.
        flags: the other flags.

    Raises:
        ConfigError: unknown model, or flags that it does not support.
    """
    _check(flags)
    notes: list[str] = []
    if recipe is None:
        config = _of_model(model, machine)
    else:
        config = _of_recipe(recipe, notes)
    config = _trained(config, flags)
    if why := unsupported(config):
        raise ConfigError(
            f"{model}: {why} can't be planned yet; jaxvlm train --dry_run compiles the step and "
            "reports its memory"
        )
    if config.mesh.island != 1:
        island_checks.check(config)
    data = dataclasses.replace(
        config.data,
        max_length=flags.length or config.data.max_length,
        batch_size=flags.batch or (config.data.batch_size if recipe else machine.devices),
        max_images_per_sequence=max(flags.images, 0) or config.data.max_images_per_sequence,
        max_patches_per_sequence=flags.patches or config.data.max_patches_per_sequence,
    )
    if recipe is None:
        notes += [] if flags.batch else [f"a batch of {data.batch_size}, one per device"]
        is_noted = flags.length or trains_embeddings(config)  # noted in _pairing
        notes += [] if is_noted else [f"sequences of {data.max_length} tokens"]
    config = dataclasses.replace(config, data=data)
    row = _sequence_shape(config, flags, recipe is not None, notes)
    if recipe is None and config.embedder == "vlm":
        data = dataclasses.replace(
            data, max_images_per_sequence=max(1, row.images), max_patches_per_sequence=row.patches
        )
        config = dataclasses.replace(config, data=data)
    pairing = _pair_shapes(config, row, notes) if trains_embeddings(config) else None
    file_dtypes = _file_dtypes(config, "" if recipe else model, notes)
    return PlanRequest(
        model, config, machine, row.images, row.patches, model if recipe else "",
        flags.samples, flags.price, tuple(notes), recipe or Config(),
        pairing, file_dtypes,
    )  # fmt: skip


def unsupported(config: Config) -> str:
    """The first of a run's settings that plans don't support; "" if there is none."""
    settings = {
        "a disaggregated vision encoder "
        f"(config.encoder.devices={config.encoder.devices})": config.encoder.devices != 0,
        "encoding images in batches of their own "
        f"(config.cache.encode_batch={config.cache.encode_batch})": config.cache.encode_batch > 0,
    }
    return next((name for name, is_set in settings.items() if is_set), "")


def undivided(config: Config, devices: int) -> str:
    """Why so many devices do not make the run's islands; "" if they do."""
    islands = config.mesh.island
    is_even = devices % islands == 0
    return "" if is_even else f"{devices} devices are not divisible by config.mesh.island={islands}"


def _check(flags: RequestFlags) -> None:
    if flags.train not in ("", *TRAINED):
        raise ConfigError(f"--train={flags.train}; known: {', '.join(TRAINED)}")
    if flags.objective not in ("", *OBJECTIVES):
        raise ConfigError(f"--objective={flags.objective}; known: {', '.join(OBJECTIVES)}")
    least: dict[str, float] = {"batch": flags.batch, "seq": flags.length, "patches": flags.patches}
    least |= {"samples": flags.samples, "price": flags.price}
    for name, value in least.items():
        if not 0 <= value < math.inf:
            raise ConfigError(f"--{name}={value:g}: it must be above 0")
    if flags.images < -1:
        raise ConfigError(f"--images={flags.images}: it must be at least 0")


def _of_model(name: str, machine: Machine) -> Config:
    """Default settings with the dims of a folder or of a published model."""
    hf_config, source = _described(name, "--model")
    model = config_reader.model_of(any_family(hf_config, source), hf_config)
    dtype = "float32" if machine.platform == "cpu" else "bfloat16"
    network = dataclasses.replace(model, dtype=dtype, checkpoint=_folder(name))
    if isinstance(network, DualConfig):
        config = Config(embedder="dual", dual=network, **_usual_loss(network))
        length = network.text.max_length if "text" in network.towers else 0
    else:
        config, length = Config(model=network), 2048
    return dataclasses.replace(config, data=dataclasses.replace(config.data, max_length=length))


def _usual_loss(model: DualConfig) -> dict[str, Any]:
    """The loss that a published dual encoder was trained with: SigLIP's, CLIP's, or InfoNCE of
    texts.
    """
    if model.has_bias:
        return {"loss": LossConfig(name="sigmoid")}
    if model.towers != ("vision", "text"):
        return {"loss": LossConfig(name="info_nce")}
    directions = ("query_to_document", "document_to_query")
    clip = PairLossConfig(temperature=0.0, directions=directions, softmax_scope="each")
    return {"loss": LossConfig(name="info_nce"), "pair_loss": clip}


def _folder(name: str) -> str:
    return name if pathlib.Path(name).expanduser().is_dir() else ""


def _of_recipe(recipe: Config, notes: list[str]) -> Config:
    """The recipe with its checkpoint's dims."""
    if recipe.embedder == "dual":
        return dataclasses.replace(recipe, dual=_of_dual(recipe, notes))
    model = recipe.model
    if model.checkpoint:
        hf_config, source = _described(model.checkpoint, "config.model.checkpoint")
        choose = family_of(model.family, "config.model.family", any_family)
        network = config_reader.model_of(choose(hf_config, source), hf_config)
        if not isinstance(network, ModelConfig):
            raise ConfigError(
                f"config.model.checkpoint={model.checkpoint} is a dual encoder: set "
                "config.embedder='dual' and config.dual.checkpoint"
            )
        model = merged_model(model, network)
        if model.lora.checkpoint:
            recipe = _adapted(dataclasses.replace(recipe, model=model), hf_config)
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


def _vocabulary(recipe: Config, notes: list[str]) -> int:
    """Vocabulary size of a tokenizer that will be trained on the data."""
    most = recipe.tokenizer.vocab_size
    notes.append(f"a vocabulary of {most} tokens, the maximum of its tokenizer")
    return -(-most // _VOCABULARY) * _VOCABULARY


def _of_dual(recipe: Config, notes: list[str]) -> DualConfig:
    """A recipe's dual encoder with the dims of its checkpoint, or of its towers' checkpoints."""
    from jaxvlm.hf import dual_encoder as duals  # imports weight readers, which few plans need

    def described(field: str) -> DualConfig:
        name, setting = getattr(recipe.dual, field), f"config.dual.{field}"
        hf_config, source = _described(name, setting)
        network = config_reader.model_of(any_family(hf_config, source), hf_config)
        if not isinstance(network, DualConfig):
            raise ConfigError(f"{setting}={name} is neither a dual encoder nor a tower of one")
        return network

    model = recipe.dual
    if model.checkpoint:
        return duals.merged(model, described("checkpoint"))
    towers: dict[str, Any] = {}
    for name in model.towers:
        if name == "vision" and (vision := duals.vision_of_run(recipe)):
            towers[name] = vision
        elif getattr(model, f"{name}_checkpoint"):
            pretrained_tower = getattr(described(f"{name}_checkpoint"), name)
            towers[name] = duals.with_tower(getattr(model, name), pretrained_tower, name)
    model = dataclasses.replace(model, **towers)
    if "text" in model.towers and not model.text.vocab_size:
        text = dataclasses.replace(model.text, vocab_size=_vocabulary(recipe, notes))
        model = dataclasses.replace(model, text=text)
    return model


def _adapted(recipe: Config, hf_config: dict[str, Any]) -> Config:
    """The recipe with the rank and targets of its adapters' folder."""
    from jaxvlm.hf import peft_folder, pretrained  # imports weight readers, which few plans need

    name = recipe.model.checkpoint
    folder = pathlib.Path(name).expanduser()
    choose = family_of(recipe.model.family, "config.model.family", any_family)
    source = pretrained.Source(folder, folder, hf_config, choose(hf_config, name))
    return peft_folder.with_adapter(recipe, source, None)


def _file_dtypes(config: Config, name: str, notes: list[str]) -> Held:
    """Dtypes of a run's parameters in the files that they are read from.

    Args:
        config: of the run.
        name: the folder or the published model that is planned; "" for a recipe.
        notes: gets a line where the dtype of frozen weights had to be assumed.
    """
    network, tower_of_run = config.network, None
    names = {"": name or network.checkpoint}
    if isinstance(network, DualConfig) and not names[""]:
        from jaxvlm.hf import dual_encoder as duals  # imports weight readers

        names = {t: getattr(network, f"{t}_checkpoint") for t in network.towers}
        if duals.vision_of_run(config):
            tower_of_run = pathlib.Path(names.pop("vision")).expanduser()
    names = {tower: name for tower, name in names.items() if name}
    if not (names or config.init_from or tower_of_run):
        return ()
    from jaxvlm.hf import frozen_dtypes, pretrained  # import weight readers

    sources = {}
    for tower, name in names.items():
        hf_config, found = _described(name, "checkpoint")
        own = Extension() if isinstance(network, DualConfig) else network.family
        choose = family_of(own, "config.model.family", any_family)
        if name in model_zoo.names() and not _folder(name):
            dtype = "bfloat16" if isinstance(network, ModelConfig) else "float32"
            hf_config = {**hf_config, "dtype": dtype}
            if config.optim.frozen or network.lora.rank:
                notes.append(f"a checkpoint in {dtype}, which frozen weights keep")
        folder = pathlib.Path(name).expanduser()
        sources[tower] = pretrained.Source(folder, folder, hf_config, choose(hf_config, found))
    read = frozen_dtypes.of_run(config, sources, None, tower_of_run)
    return tuple(sorted((path, str(np.dtype(dtype))) for path, dtype in read.items()))


def _described(name: str, what: str) -> tuple[dict[str, Any], str]:
    """(config.json, where it is from) of a folder, or of a published model by its name."""
    folder = pathlib.Path(name).expanduser()
    if folder.is_dir():
        return json_object(folder / "config.json", f"{what} takes a checkpoint's folder"), name
    if name in model_zoo.names():
        return dict(model_zoo.published_config(name)), name
    known = ", ".join(model_zoo.names())
    raise ConfigError(
        f"{what}={name}: neither a folder (a plan downloads nothing) nor a known published model: "
        f"{known}; a recipe ends in .py"
    )


def _trained(config: Config, flags: RequestFlags) -> Config:
    """The settings with ``--train`` and ``--objective`` applied."""
    is_dual = config.embedder == "dual"
    if is_dual and (flags.objective == "sft" or not (flags.objective or trains_embeddings(config))):
        raise ConfigError(
            f"{'--objective=sft' if flags.objective else loss_setting(config)}: a dual "
            "encoder makes embeddings and predicts no tokens; use --objective=contrastive"
        )
    if is_dual and flags.train == "connector":
        raise ConfigError("--train=connector: a dual encoder has no connector; use full or lora")
    if flags.objective and trains_embeddings(config) != (flags.objective == "contrastive"):
        config = dataclasses.replace(config, loss=LossConfig(name=OBJECTIVES[flags.objective]))
    lora, frozen = config.network.lora, config.optim.frozen
    if flags.train == "lora":
        lora, frozen = (lora if lora.rank else LoraConfig(rank=16, alpha=32.0)), ()
    elif flags.train:
        lora, frozen = LoraConfig(), _TOWERS if flags.train == "connector" else ()
    return with_network(
        dataclasses.replace(config, optim=dataclasses.replace(config.optim, frozen=frozen)),
        dataclasses.replace(config.network, lora=lora),
    )


def with_network(config: Config, network: ModelConfig | DualConfig) -> Config:
    """A run with another model of the same kind."""
    if isinstance(network, DualConfig):
        return dataclasses.replace(config, dual=network)
    return dataclasses.replace(config, model=network)


def _sequence_shape(
    config: Config, flags: RequestFlags, is_recipe: bool, notes: list[str]
) -> BatchShape:
    """Sizes of a packed sequence; of pairs, of a document, and a dual encoder's image."""
    if config.embedder == "dual":
        return _dual_shape(config, flags)
    images, patches = _images(config, flags, is_recipe, notes)
    return BatchShape(config.data.max_length, images, patches)


def _dual_shape(config: Config, flags: RequestFlags) -> BatchShape:
    """Sizes of the text and the image of a dual encoder's example."""
    model, length = config.dual, config.data.max_length
    has = 1 if "vision" in model.towers else 0
    if flags.images > has:
        raise ConfigError(
            f"--images={flags.images}: an example of this model has "
            f"{'one image' if has else 'texts alone'}"
        )
    if flags.length > (most := model.text.max_length):
        raise ConfigError(f"--seq={flags.length}: this model's texts have at most {most} tokens")
    if flags.patches and not (has and model.vision.packed):
        raise ConfigError(f"--patches={flags.patches}: this model's images have one size")
    vision = model.vision
    usual = config.data.max_patches_per_sequence or (vision.image_size // vision.patch_size) ** 2
    patches = flags.patches or usual if vision.packed else 0
    has = has if flags.images else 0
    return BatchShape(min(length, most) if "text" in model.towers else 0, has, patches * has)


def _pair_shapes(config: Config, row: BatchShape, notes: list[str]) -> PairShapes:
    """Shapes of an example for a run on pairs, as far as its settings determine them.

    Raises:
        ConfigError: settings that can't be combined with pairs.
    """
    if config.microbatches > 1:
        raise ConfigError(
            f"config.microbatches={config.microbatches} can't be combined with "
            f"{loss_setting(config)}: set config.grad_cache.query_mini_batch and "
            "document_mini_batch instead"
        )
    own = config.data.pairs
    lengths = [own.max_query_length or row.length, own.max_document_length or row.length]
    query, document = (BatchShape(min(row.length, n)) for n in lengths)
    if row.images and config.embedder == "dual":
        query = row._replace(length=0)
    elif row.images:
        document = row._replace(length=document.length)
    document = document if document.length else query  # images alone
    notes.append(f"queries of {_size_text(query)}, documents of {_size_text(document)}")
    documents = 1 + max(0, own.max_negatives)
    return PairShapes(query, document, pairs.embedding_settings(config), documents)


def _size_text(rows: BatchShape) -> str:
    words = [f"{rows.length} tokens"] if rows.length else []
    words += [f"{rows.images} image{'s' * (rows.images > 1)}"] if rows.images else []
    return " with ".join(words)


def _images(
    config: Config, flags: RequestFlags, is_recipe: bool, notes: list[str]
) -> tuple[int, int]:
    """(images, patches) of a packed sequence."""
    model, length = config.model, config.data.max_length
    a_token = model.connector.merge**2
    if not model.vision.packed:
        most = length // num_visual_tokens(model)
        if flags.patches:
            raise ConfigError(f"--patches={flags.patches}: this model's images have one size")
        if flags.images > most:
            raise ConfigError(
                f"--images={flags.images}: sequences of {length} tokens have room for {most} "
                f"({num_visual_tokens(model)} tokens each)"
            )
        if flags.images >= 0:
            return flags.images, 0
        if is_recipe:
            return min(config.data.max_images_per_sequence, most), 0
        images = max(min(1, most), most // 2)
        notes.append(f"{images} x {num_visual_tokens(model)} of a sequence's tokens are of images")
        return images, 0
    patches = flags.patches or config.data.max_patches_per_sequence
    if patches > length * a_token:
        raise ConfigError(
            f"--patches={patches}: sequences of {length} tokens have room for {length * a_token}"
        )
    images = flags.images if flags.images >= 0 else config.data.max_images_per_sequence
    if not is_recipe and flags.images < 0:
        images = 2
    if not images:
        return 0, 0
    if not patches:
        notes.append("images fill half of a sequence")
        patches = length // 2 * a_token
    return images, patches
