"""Hugging Face checkpoints that runs start from."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxvlm.build.merge import json_object, merged_model
from jaxvlm.config import ConfigError, DualConfig, ModelConfig, TrainConfig, VisionConfig
from jaxvlm.data import images, processor
from jaxvlm.data.errors import DataError
from jaxvlm.data.patches import Patching
from jaxvlm.data.tokenizer import ChatTokenizer
from jaxvlm.io import hf
from jaxvlm.models.families import anyres, family, parts, sentences
from jaxvlm.models.vlm import num_visual_tokens
from jaxvlm.types import Params, Span

SAVED = "source"
"""Folder in a workdir: all of the checkpoint but its weights, and their layout."""
LAYOUT = "jaxvlm_layout.json"
"""File in it: where each tensor lay."""
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


class Source(NamedTuple):
    """A Hugging Face checkpoint."""

    weights: pathlib.Path
    """Folder of its tensors."""
    files: pathlib.Path
    """Folder of all else: the same, or the copy in a workdir."""
    hf_config: Mapping[str, Any]
    family: Any
    """A ``Family``, or an ``EncoderFamily``."""


def find(
    checkpoint: str,
    workdir: pathlib.Path | None = None,
    choose: Callable[[Mapping[str, Any], str], Any] = family,
) -> Source | None:
    """The checkpoint that a run starts from, ``None`` where it starts from scratch.

    Args:
        checkpoint: folder, or an id of the hub; "" is none.
        workdir: of the run; what it has kept of the checkpoint comes first.
        choose: which families will do: ``family``, or ``any_family``.

    Raises:
        ConfigError: there is no such checkpoint, or its family is unknown.
    """
    if not checkpoint:
        return None
    kept = workdir / SAVED if workdir is not None else None
    if kept is not None and kept.is_dir():
        weights = files = kept
        if pathlib.Path(checkpoint).expanduser().is_dir():
            weights = pathlib.Path(checkpoint).expanduser()
            _check_same(kept, weights)
    else:
        weights = files = _fetched(checkpoint)
    config = json_object(files / "config.json")
    return Source(weights, files, config, choose(config, str(files)))


def with_weights(source: Source, checkpoint: str) -> Source:
    """``source`` with its weights at hand, which a run that came from the hub does not keep."""
    if source.weights.name != SAVED or pathlib.Path(checkpoint).expanduser().is_dir():
        return source
    return source._replace(weights=_fetched(checkpoint))


def _check_same(kept: pathlib.Path, given: pathlib.Path) -> None:
    """Refuse a checkpoint that is not the one that a run has kept the files of."""
    for path in sorted(kept.iterdir()):
        other = given / path.name
        if path.is_file() and other.is_file() and other.read_bytes() != path.read_bytes():
            raise ConfigError(
                f"{other} differs from what this run started from ({path}); start in another "
                "workdir, or put the checkpoint back"
            )


def is_checkpoint(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder is a Hugging Face checkpoint and not a workdir."""
    path = pathlib.Path(folder) / "config.json"
    if not path.is_file():
        return not pathlib.Path(folder).exists() and bool(_HUB_ID.fullmatch(str(folder)))
    return "model_type" in json_object(path)


def with_source(config: TrainConfig, source: Source | None) -> TrainConfig:
    """``config`` with the checkpoint's dims and the processor's mean and deviation filled in.

    Raises:
        ConfigError: a field of ``config.json`` or a setting of the recipe that can't be had.
    """
    if source is None:
        return config
    found = _with_head(source, source.family.config_from_hf(source.hf_config))
    wanted, takes = _prepared(source, config), _patching(found.vision)
    if wanted.patching != takes:
        raise ConfigError(
            f"{source.files}: the processor cuts pictures by {wanted.patching}, but the model "
            f"takes {takes}"
        )
    if takes is None and wanted.size != found.vision.image_size:
        raise ConfigError(
            f"{source.files}: the processor makes pictures of {wanted.size} pixels, but the model "
            f"takes {found.vision.image_size}"
        )
    mean, std = wanted.mean, wanted.std
    vision = dataclasses.replace(found.vision, pixel_mean=mean, pixel_std=std)
    model = merged_model(config.model, dataclasses.replace(found, vision=vision))
    return dataclasses.replace(config, model=model)


def pictures(
    config: TrainConfig, source: Source | None, tokenizer: ChatTokenizer
) -> images.PictureFormat:
    """What the run's model wants of a picture: as the checkpoint says, or as the recipe does."""
    size, data = config.model.vision.image_size, config.data
    prepare = images.squares(size, data.resize)
    patching = _patching(config.model.vision)
    if patching is None and data.max_patches:
        raise ConfigError(
            f"config.data.max_patches={data.max_patches}: this model's pictures have one size; "
            "leave it out"
        )
    if source is None:
        if patching is not None:
            raise ConfigError(
                "config.model.vision.packed=True: models for pictures of any size are started from "
                "a checkpoint, config.model.checkpoint"
            )
        if any(data.picture_pixels):
            raise ConfigError(
                f"config.data.picture_pixels={data.picture_pixels}: this model's pictures have one "
                "size, config.model.vision.image_size; leave it out"
            )
        count = num_visual_tokens(config.model)
        span = Span.of(tokenizer.image_id, count)
        if config.model.connector.newline:
            span = anyres.whole(tokenizer.image_id, math.isqrt(count))
        return images.PictureFormat(prepare, size, lambda _width, _height: span)
    if patching is not None and data.resize != "auto":
        raise ConfigError(
            f"config.data.resize={data.resize} makes squares, but this model takes pictures of any "
            "size; leave it out (config.data.picture_pixels bounds them)"
        )
    grid = None
    if data.resize == "auto":
        wanted = _prepared(source, config)
        prepare, grid = wanted.prepare, wanted.grid
    cut = grid or parts.whole
    find = source.family.span(config.model, source.hf_config, tokenizer.encode, cut)
    side = size if patching is None else 0
    return images.PictureFormat(prepare, side, find, fixed=grid is None, patching=patching)


def check_tokens(source: Source | None, tokenizer: ChatTokenizer) -> None:
    """Refuse a tokenizer whose picture token is not the model's.

    Raises:
        ConfigError: the two ids.
    """
    if source is None:
        return
    names = ("image_token_id", "image_token_index")
    ids = [source.hf_config[name] for name in names if source.hf_config.get(name) is not None]
    if ids and tokenizer.image_id not in ids:
        raise ConfigError(
            f"{source.files}: the picture token has id {tokenizer.image_id} in the tokenizer but "
            f"{ids[0]} in config.json"
        )


def read_params(source: Source, config: ModelConfig | DualConfig, abstract: Params) -> Params:
    """The checkpoint's parameters, streamed to their shards; see ``jaxvlm.io.hf``."""
    found: Params = {}
    place = sentences.place(modules(source.files), sentences.DENSE)
    if isinstance(config, DualConfig) and place:
        own = {path: x for path, x in abstract.items() if path.startswith("head/")}
        found = hf.read_params(source.weights / place, sentences.linear_map(config), own)
        abstract = {path: x for path, x in abstract.items() if path not in own}
    return found | hf.read_params(source.weights, source.family.weights(config), abstract)


def _fetched(checkpoint: str) -> pathlib.Path:
    """The folder of a checkpoint, downloaded where it is an id of the hub."""
    folder = pathlib.Path(checkpoint).expanduser()
    if folder.is_dir():
        return folder
    if not _HUB_ID.fullmatch(checkpoint):
        raise ConfigError(f"checkpoint {checkpoint}: no such folder")
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.jinja", "*.txt", "*.model", "*.safetensors"]
    try:
        return pathlib.Path(snapshot_download(checkpoint, allow_patterns=wanted))
    except Exception as error:  # the hub's client raises all kinds
        short = str(error).strip().splitlines()[:1]
        raise ConfigError(
            f"checkpoint {checkpoint} is no folder here, and the hub does not give "
            f"it: {type(error).__name__}: {''.join(short)}"
        ) from None


def _patching(vision: VisionConfig) -> Patching | None:
    """How a tower's pictures are cut; ``None`` where they have one size."""
    if not vision.packed:
        return None
    return Patching(vision.patch_size, vision.block, vision.frames, vision.patch_layout)


def _prepared(source: Source, config: TrainConfig) -> processor.Processor:
    try:
        return processor.load(source.files, config.data.picture_pixels)
    except DataError as error:
        raise ConfigError(str(error)) from None


def _with_head(source: Source, found: ModelConfig) -> ModelConfig:
    """``found``, without an output matrix where the checkpoint has none.

    Models that embed are published so, and their ``config.json`` does not tell.
    """
    if found.decoder.tied_embeddings:
        return found
    bare = dataclasses.replace(found, decoder=dataclasses.replace(found.decoder, head=False))
    try:
        source.family.weights(bare).check(_shapes(source), str(source.weights))
    except ConfigError:
        return found  # what does not fit is told where the weights are read
    return bare


def _shapes(source: Source) -> dict[str, tuple[int, ...]]:
    """Shapes of the checkpoint's tensors; its weights may be gone, once a run has started."""
    if (kept := source.weights / LAYOUT).is_file():
        return {name: tuple(shape) for name, (_, _, shape) in json_object(kept).items()}
    return {name: stored.shape for name, stored in hf.read_layout(source.weights).items()}


def modules(folder: pathlib.Path) -> list[dict[str, Any]]:
    """What ``modules.json`` of a sentence-transformers folder lists; [] where there is none.

    Raises:
        ConfigError: it is damaged, or names a place outside the folder.
    """
    path = folder / "modules.json"
    if not path.is_file():
        return []
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        paths = [pathlib.PurePosixPath(module.get("path", "")) for module in found]
    except (ValueError, AttributeError, TypeError) as error:
        raise ConfigError(f"{path} is damaged: {error}; fetch it again") from None
    if any(p.is_absolute() or ".." in p.parts for p in paths):
        raise ConfigError(f"{path} names a place outside of its folder")
    return found


def module_config(
    folder: pathlib.Path, listed: list[dict[str, Any]], kind: str = "Pooling"
) -> dict[str, Any]:
    """What a module of :func:`modules` says; {} where there is none."""
    place = sentences.place(listed, kind)
    return optional(folder / place / "config.json") if place else {}


def optional(path: pathlib.Path) -> dict[str, Any]:
    """As :func:`json_object`; {} where there is no file."""
    return json_object(path) if path.is_file() else {}
