"""Finds and reads Hugging Face checkpoints that runs start from."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxvlm.checkpoint import run_record
from jaxvlm.config import Config, ConfigError, DualConfig, ModelConfig, VisionConfig, json_text
from jaxvlm.config.merge import json_object, merged_model
from jaxvlm.hf import safetensors
from jaxvlm.hf.families import ChooseFamily, common, config_reader, family, family_of, sentences
from jaxvlm.types import Params

if TYPE_CHECKING:  # what reads images and texts is imported where it is used: plans don't
    from jaxvlm.data.images import image_files, processor
    from jaxvlm.data.images.patches import Patching
    from jaxvlm.data.tokenizer.chat_tokenizer import ChatTokenizer

SAVED = "source"
"""Folder in a workdir with the checkpoint's files other than weights, and the weights' layout."""
LAYOUT = "jaxvlm_layout.json"
"""File in that folder: file, dtype and shape of each tensor."""
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


class Source(NamedTuple):
    """A Hugging Face checkpoint."""

    weights: pathlib.Path
    """Folder of its tensors."""
    files: pathlib.Path
    """Folder of its other files: the same folder, or the copy in a workdir."""
    hf_config: Mapping[str, Any]
    """Content of its ``config.json``."""
    family: Any
    """A ``Family``, or an ``EncoderFamily``."""


def find(
    checkpoint: str,
    workdir: pathlib.Path | None = None,
    choose: ChooseFamily = family,
    tower: str = "",
) -> Source | None:
    """Find the checkpoint that a run starts from; ``None`` if it starts from scratch.

    Args:
        checkpoint: folder or hub id; "" is none.
        workdir: workdir of the run; its copy of the checkpoint's files takes precedence, once the
            run has weights. One of a start that saved none may be of another checkpoint.
        choose: selects the family: ``family``, ``any_family``, or what
            :func:`jaxvlm.hf.families.family_of` returns.
        tower: that it is the checkpoint of; "" is the whole model.

    Raises:
        ConfigError: there is no such checkpoint, or its family is unknown.
    """
    if not checkpoint:
        return None
    saved = workdir / tower / SAVED if workdir is not None else None
    if workdir and saved and saved.is_dir() and run_record.has_checkpoint(workdir):
        weights = files = saved
        if pathlib.Path(checkpoint).expanduser().is_dir():
            weights = pathlib.Path(checkpoint).expanduser()
            _check_same(saved, weights)
    else:
        weights = files = _fetch(checkpoint)
    config = json_object(files / "config.json")
    return Source(weights, files, config, choose(config, str(files)))


def find_for(model: ModelConfig, workdir: pathlib.Path | None = None) -> Source | None:
    """The checkpoint of a vision-language model's settings; see :func:`find`.

    Raises:
        ConfigError: there is no such checkpoint, its family is unknown, or the user's own family
            can't be used.
    """
    if model.family.target and not model.checkpoint:
        raise ConfigError(
            f"config.model.family.target={model.family.target!r} is not read without "
            "config.model.checkpoint"
        )
    return find(model.checkpoint, workdir, family_of(model.family, "config.model.family"))


def with_weights(source: Source, checkpoint: str) -> Source:
    """Return ``source`` with its weights, downloaded from the hub if the workdir has none."""
    if source.weights.name != SAVED or pathlib.Path(checkpoint).expanduser().is_dir():
        return source
    return source._replace(weights=_fetch(checkpoint))


def _check_same(saved: pathlib.Path, given: pathlib.Path) -> None:
    """Check that a checkpoint is the one that a run started from, by its copied files."""
    for path in sorted(saved.iterdir()):
        other = given / path.name
        if path.is_file() and other.is_file() and other.read_bytes() != path.read_bytes():
            raise ConfigError(
                f"{other} differs from what this run started from ({path}); start in another "
                "workdir, or put the checkpoint back"
            )


def is_checkpoint(folder: str | os.PathLike[str]) -> bool:
    """Return whether a folder or hub id is a Hugging Face checkpoint, not a workdir."""
    path = pathlib.Path(folder) / "config.json"
    if not path.is_file():
        return not pathlib.Path(folder).exists() and bool(_HUB_ID.fullmatch(str(folder)))
    return "model_type" in json_object(path)


def with_source(config: Config, source: Source) -> Config:
    """Fill in the checkpoint's dims and its image processor's mean and standard deviation.

    Raises:
        ConfigError: an unsupported field of ``config.json``, or a setting that contradicts the
            checkpoint.
    """
    hf_model = _with_head(source, config_reader.model_of(source.family, source.hf_config))
    image_processor, patching = _image_processor(source, config), _patching(hf_model.vision)
    if image_processor.patching != patching:
        raise ConfigError(
            f"{source.files}: the image processor cuts images by {image_processor.patching}, but "
            f"the model takes {patching}"
        )
    if patching is None and image_processor.size != hf_model.vision.image_size:
        raise ConfigError(
            f"{source.files}: the image processor returns images of {image_processor.size} pixels, "
            f"but the model takes {hf_model.vision.image_size}"
        )
    mean, std = image_processor.mean, image_processor.std
    vision = dataclasses.replace(hf_model.vision, pixel_mean=mean, pixel_std=std)
    model = merged_model(config.model, dataclasses.replace(hf_model, vision=vision))
    return dataclasses.replace(config, model=model)


def image_format(
    config: Config, source: Source, tokenizer: ChatTokenizer
) -> image_files.ImageFormat:
    """Return how images are prepared for the model of a checkpoint.

    Raises:
        ConfigError: a setting of images that does not fit the model.
    """
    from jaxvlm.data.images import image_files

    size, data = config.model.vision.image_size, config.data
    prepare = image_files.squares(size, data.resize)
    patching = _patching(config.model.vision)
    if patching is not None and data.resize != "auto":
        raise ConfigError(
            f"config.data.resize={data.resize} resizes to squares, but this model takes images of "
            "any size; leave it out (config.data.image_pixels_range bounds their size)"
        )
    grid = None
    if data.resize == "auto":
        image_processor = _image_processor(source, config)
        prepare, grid = image_processor.prepare, image_processor.grid
    tile_grid = grid or common.whole
    span = source.family.span(config.model, source.hf_config, tokenizer.encode, tile_grid)
    side = size if patching is None else 0
    return image_files.ImageFormat(prepare, side, span, fixed=grid is None, patching=patching)


def check_tokens(source: Source, tokenizer: ChatTokenizer) -> None:
    """Check that the tokenizer's image token is the model's.

    Raises:
        ConfigError: it is not; the message has both ids.
    """
    names = ("image_token_id", "image_token_index")
    ids = [source.hf_config[name] for name in names if source.hf_config.get(name) is not None]
    if ids and tokenizer.image_id not in ids:
        raise ConfigError(
            f"{source.files}: the image token has id {tokenizer.image_id} in the tokenizer but "
            f"{ids[0]} in config.json"
        )


def read_params(source: Source, config: ModelConfig | DualConfig, abstract: Params) -> Params:
    """Read the checkpoint's parameters into their shards; see ``jaxvlm.hf.safetensors``."""
    dense: Params = {}
    place = sentences.place(modules(source.files), sentences.DENSE)
    if isinstance(config, DualConfig) and place:
        head = {path: x for path, x in abstract.items() if path.startswith("head/")}
        dense = safetensors.read_params(source.weights / place, sentences.linear_map(config), head)
        abstract = {path: x for path, x in abstract.items() if path not in head}
    return dense | safetensors.read_params(source.weights, source.family.weights(config), abstract)


def _fetch(checkpoint: str) -> pathlib.Path:
    """Return the folder of a checkpoint, which is downloaded if it is a hub id."""
    folder = pathlib.Path(checkpoint).expanduser()
    if folder.is_dir():
        return folder
    if not _HUB_ID.fullmatch(checkpoint):
        raise ConfigError(f"checkpoint {checkpoint}: no such folder")
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.jinja", "*.txt", "*.model", "*.safetensors"]
    try:
        return pathlib.Path(snapshot_download(checkpoint, allow_patterns=wanted))
    except Exception as error:  # the hub's client raises many types
        short = str(error).strip().splitlines()[:1]
        raise ConfigError(
            f"checkpoint {checkpoint} is not a folder, and can't be downloaded from the hub: "
            f"{type(error).__name__}: {''.join(short)}"
        ) from None


def _patching(vision: VisionConfig) -> Patching | None:
    """Return how a vision encoder's images are patchified; ``None`` for images of one size."""
    from jaxvlm.data.images.patches import Patching

    if not vision.packed:
        return None
    return Patching(vision.patch_size, vision.merge_block, vision.frames, vision.patch_layout)


def _image_processor(source: Source, config: Config) -> processor.Processor:
    from jaxvlm.data.errors import DataError
    from jaxvlm.data.images import processor

    try:
        return processor.load(source.files, config.data.image_pixels_range)
    except DataError as error:
        raise ConfigError(str(error)) from None


def _with_head(source: Source, model: ModelConfig) -> ModelConfig:
    """Return ``model``, without an output projection if the checkpoint has none.

    Embedding models are published without one, and their ``config.json`` does not say so.
    """
    if model.decoder.tied_embeddings:
        return model
    headless = dataclasses.replace(model, decoder=dataclasses.replace(model.decoder, head=False))
    try:
        source.family.weights(headless).check(_shapes(source), str(source.weights))
    except ConfigError:
        return model  # tensors that do not fit are reported when the weights are read
    return headless


def _shapes(source: Source) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the checkpoint's tensors, also after its weights were removed."""
    if (saved := source.weights / LAYOUT).is_file():
        return {name: tuple(shape) for name, (_, _, shape) in json_object(saved).items()}
    return {name: stored.shape for name, stored in safetensors.read_layout(source.weights).items()}


def modules(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Read the list in a sentence-transformers folder's ``modules.json``; [] if there is none.

    Raises:
        ConfigError: it is damaged, or names a path outside of the folder.
    """
    path = folder / "modules.json"
    if not path.is_file():
        return []
    try:
        listed = json_text.read(path)
        paths = [pathlib.PurePosixPath(module.get("path", "")) for module in listed]
    except (ValueError, AttributeError, TypeError) as error:
        raise ConfigError(f"{path} is damaged: {error}; fetch it again") from None
    if any(p.is_absolute() or ".." in p.parts for p in paths):
        raise ConfigError(f"{path} names a path outside of its folder")
    return listed


def module_config(
    folder: pathlib.Path, listed: list[dict[str, Any]], kind: str = "Pooling"
) -> dict[str, Any]:
    """Read the ``config.json`` of the first module of a kind; {} if there is no such module."""
    place = sentences.place(listed, kind)
    return optional(folder / place / "config.json") if place else {}


def sentence_settings(source: Source) -> dict[str, Any]:
    """Read a sentence-transformers folder's own settings, such as prompts; {} for other folders."""
    return optional(source.files / "config_sentence_transformers.json")


def optional(path: pathlib.Path) -> dict[str, Any]:
    """Read a JSON object as :func:`json_object` does; {} if there is no file."""
    return json_object(path) if path.is_file() else {}
