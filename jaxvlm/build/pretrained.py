"""Hugging Face checkpoints at both ends of a run: what starts it, and what it exports."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import shutil
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxvlm.config import ConfigError, ModelConfig, TrainConfig
from jaxvlm.data import images, processor
from jaxvlm.data.errors import DataError
from jaxvlm.data.tokenizer import ChatTokenizer
from jaxvlm.io import hf
from jaxvlm.models.families import Family, family
from jaxvlm.models.vlm import num_visual_tokens
from jaxvlm.types import Params, Span

SAVED = "source"
"""Folder in a workdir: all of the checkpoint but its weights, and their layout."""
_LAYOUT = "jaxvlm_layout.json"
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5")
_SMALL = 2**27  # bytes: what is larger is no tokenizer
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_OURS = ("remat",)
"""Settings of a tower that say how it is computed, not what; a recipe may set them."""


class Source(NamedTuple):
    """A Hugging Face checkpoint."""

    weights: pathlib.Path
    """Folder of its tensors."""
    files: pathlib.Path
    """Folder of all else: the same, or the copy in a workdir."""
    hf_config: Mapping[str, Any]
    family: Family


def find(checkpoint: str, workdir: pathlib.Path | None = None) -> Source | None:
    """The checkpoint that a run starts from, ``None`` where it starts from scratch.

    Args:
        checkpoint: folder, or an id of the hub; "" is none.
        workdir: of the run; what it has kept of the checkpoint comes first.

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
    else:
        weights = files = _fetched(checkpoint)
    config = _json(files / "config.json")
    return Source(weights, files, config, family(config, str(files)))


def is_checkpoint(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder is a Hugging Face checkpoint and not a workdir."""
    path = pathlib.Path(folder) / "config.json"
    if not path.is_file():
        return not pathlib.Path(folder).exists() and bool(_HUB_ID.fullmatch(str(folder)))
    return "model_type" in _json(path)


def with_source(config: TrainConfig, source: Source | None) -> TrainConfig:
    """``config`` with the checkpoint's dims and the processor's mean and deviation filled in.

    Raises:
        ConfigError: a field of ``config.json`` or a setting of the recipe that can't be had.
    """
    if source is None:
        return config
    found = _with_head(source, source.family.config_from_hf(source.hf_config))
    if found.vision.packed:
        raise ConfigError(
            f"{source.files}: pictures of any size can't be read from data yet, and this model "
            "takes them so"
        )
    wanted = _prepared(source)
    if wanted.size != found.vision.image_size:
        raise ConfigError(
            f"{source.files}: the processor makes pictures of {wanted.size} pixels, but the model "
            f"takes {found.vision.image_size}"
        )
    mean, std = wanted.mean, wanted.std
    vision = dataclasses.replace(found.vision, pixel_mean=mean, pixel_std=std)
    model = _merged(config.model, dataclasses.replace(found, vision=vision))
    return dataclasses.replace(config, model=model)


def pictures(
    config: TrainConfig, source: Source | None, tokenizer: ChatTokenizer
) -> images.PictureFormat:
    """What the run's model wants of a picture: as the checkpoint says, or as the recipe does."""
    size = config.model.vision.image_size
    prepare = images.squares(size, config.data.resize)
    if source is None:
        span = Span.of(tokenizer.image_id, num_visual_tokens(config.model))
        return images.PictureFormat(prepare, size, lambda _width, _height: span)
    if config.data.resize == "auto":
        prepare = _prepared(source).prepare
    find = source.family.span(config.model, source.hf_config, tokenizer.encode)
    return images.PictureFormat(prepare, size, find)


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


def read_params(source: Source, config: ModelConfig, abstract: Params) -> Params:
    """The checkpoint's parameters, streamed to their shards; see ``jaxvlm.io.hf``."""
    return hf.read_params(source.weights, source.family.weights(config), abstract)


def keep(source: Source, workdir: pathlib.Path) -> None:
    """Keep in ``workdir`` what answering and exporting need besides the weights."""
    if (workdir / SAVED).is_dir():
        return
    half = workdir / f"{SAVED}.tmp"  # whole or not at all
    shutil.rmtree(half, ignore_errors=True)
    _copy_files(source.files, half)
    layout = {name: list(stored) for name, stored in hf.read_layout(source.weights).items()}
    (half / _LAYOUT).write_text(json.dumps(layout), encoding="utf-8")
    half.rename(workdir / SAVED)


def export(
    workdir: pathlib.Path,
    output: pathlib.Path,
    params: Params,
    config: ModelConfig,
    dtype: str = "",
) -> dict[str, Any]:
    """Write a run's weights as the checkpoint they came from: its names, files and shards.

    Args:
        workdir: of the run.
        output: a new folder.
        params: all of them.
        config: of the model.
        dtype: ``float32``, ``bfloat16`` or ``float16``; "" is each tensor's own.

    Returns:
        How many ``tensors`` and ``bytes`` were written.

    Raises:
        ConfigError: the run has no Hugging Face family, or the folder is not empty.
    """
    source = find(config.checkpoint, workdir)
    if source is None or not (workdir / SAVED / _LAYOUT).is_file():
        raise ConfigError(
            f"{workdir}: its model was made from scratch, not from a Hugging Face checkpoint "
            "(config.model.checkpoint), so no library there knows it"
        )
    if output.exists() and any(output.iterdir()):
        raise ConfigError(f"--output={output} is not empty; give a new folder")
    if dtype not in _STORED and dtype:
        raise ConfigError(f"--dtype={dtype}; known: {', '.join(_STORED)}")
    stored = _json(workdir / SAVED / _LAYOUT)
    layout = {
        name: hf.Stored(file, _STORED.get(dtype, kind), tuple(shape))
        for name, (file, kind, shape) in stored.items()
    }
    half = output.with_name(output.name + ".tmp")
    if not jax.process_index():
        shutil.rmtree(half, ignore_errors=True)
        _copy_files(workdir / SAVED, half)
        if dtype:
            _state_dtype(half / "config.json", dtype)
    hf.write_params(half, params, source.family.weights(config), layout)
    if not jax.process_index():
        if output.exists():
            output.rmdir()
        half.rename(output)
    sizes = (np.prod(s.shape) * hf.DTYPES[s.dtype].itemsize for s in layout.values())
    return {"tensors": len(layout), "bytes": int(sum(sizes))}


_STORED = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def _fetched(checkpoint: str) -> pathlib.Path:
    """The folder of a checkpoint, downloaded where it is an id of the hub."""
    folder = pathlib.Path(checkpoint).expanduser()
    if folder.is_dir():
        return folder
    if not _HUB_ID.fullmatch(checkpoint):
        raise ConfigError(f"config.model.checkpoint={checkpoint}: no such folder")
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.jinja", "*.txt", "*.model", "*.safetensors"]
    try:
        return pathlib.Path(snapshot_download(checkpoint, allow_patterns=wanted))
    except Exception as error:  # the hub's client raises all kinds
        short = str(error).strip().splitlines()[:1]
        raise ConfigError(
            f"config.model.checkpoint={checkpoint} is no folder here, and the hub does not give "
            f"it: {type(error).__name__}: {''.join(short)}"
        ) from None


def _json(path: pathlib.Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing; give a checkpoint's folder") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds no object")
    return found


def _prepared(source: Source) -> processor.Processor:
    try:
        return processor.load(source.files)
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
    if (kept := source.weights / _LAYOUT).is_file():
        return {name: tuple(shape) for name, (_, _, shape) in _json(kept).items()}
    return {name: stored.shape for name, stored in hf.read_layout(source.weights).items()}


def _merged(given: ModelConfig, found: ModelConfig) -> ModelConfig:
    """The checkpoint's model with the recipe's way to compute it."""
    towers = {}
    for tower in ("vision", "connector", "decoder"):
        of_recipe, of_file = getattr(given, tower), getattr(found, tower)
        unset = type(of_recipe)()
        for field in dataclasses.fields(of_recipe):
            value = getattr(of_recipe, field.name)
            if field.name in _OURS:
                of_file = dataclasses.replace(of_file, **{field.name: value})
            elif value not in (getattr(unset, field.name), getattr(of_file, field.name)):
                raise ConfigError(
                    f"config.model.{tower}.{field.name}={value!r}, but the checkpoint says "
                    f"{getattr(of_file, field.name)!r}; leave it out"
                )
        towers[tower] = of_file
    return dataclasses.replace(given, **towers)


def _copy_files(source: pathlib.Path, target: pathlib.Path) -> None:
    """Copy all of a checkpoint's folder but its weights."""
    target.mkdir(parents=True)
    for path in sorted(source.iterdir()):
        weights = any(path.match(pattern) for pattern in _WEIGHTS)
        if path.is_file() and not weights and path.name != _LAYOUT and path.stat().st_size < _SMALL:
            shutil.copyfile(path, target / path.name)


def _state_dtype(path: pathlib.Path, dtype: str) -> None:
    config = _json(path)
    name = "torch_dtype" if "torch_dtype" in config else "dtype"
    path.write_text(json.dumps(config | {name: dtype}, indent=2) + "\n", encoding="utf-8")
