"""PEFT adapter folders at both ends of a run: what its adapters start from, and what it exports."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from typing import Any

import jax
import numpy as np

from jaxvlm.build import exporting, pretrained, record
from jaxvlm.build.model import Model
from jaxvlm.build.pretrained import Source
from jaxvlm.config import ConfigError, LoraConfig, ModelConfig, TrainConfig
from jaxvlm.io import hf
from jaxvlm.models import lora
from jaxvlm.models.families import peft, sentences
from jaxvlm.types import Params


def with_adapter(
    config: TrainConfig, source: Source | None, workdir: pathlib.Path | None
) -> TrainConfig:
    """``config`` with what an adapter's folder says of its rank, scale, variant and targets.

    Args:
        config: the checkpoint's dims filled in.
        source: the checkpoint that is adapted.
        workdir: of the run; what it has kept comes first, so that it can be resumed without
            the folder.

    Raises:
        ConfigError: no adapter there, or one that does not fit the model or the settings.
    """
    given = config.model.lora
    if given.checkpoint and config.init_from:
        raise ConfigError(
            f"config.model.lora.checkpoint={given.checkpoint} and config.init_from="
            f"{config.init_from} both say where the adapters come from; set one"
        )
    if source is None:
        if given.checkpoint:
            raise ConfigError(
                f"config.model.lora.checkpoint={given.checkpoint} adapts a Hugging Face model; set "
                "config.model.checkpoint to its folder"
            )
        return config
    made = given
    base = source.family.weights(config.model)
    if given.checkpoint:
        kept = _kept(workdir, given.checkpoint)
        folder = pathlib.Path(given.checkpoint).expanduser()
        made = _merged(given, kept or _read_config(folder, base))
    elif given.rank and lora.ALL in given.targets:
        without = tuple("-" + path for path in peft.not_layers(base))
        made = dataclasses.replace(given, targets=given.targets + without)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, lora=made))


def read_params(source: Source, model: Model, seed: int) -> Params:
    """A checkpoint's parameters, with the adapters of a folder or new ones.

    What stands behind a vision-language model's states to make vectors of them is in no checkpoint
    and drawn.

    Args:
        source: the checkpoint.
        model: its ``config.lora`` says where adapters come from.
        seed: of new ones.

    Raises:
        ConfigError: tensors that are missing, left over or of another shape.
    """
    config = model.config.lora
    names = _names(source, model)  # refused now, not when it is exported
    source = pretrained.with_weights(source, model.config.checkpoint)
    hf.check_copies(source.weights, source.family.weights(model.config))
    wanted, new = model.base(), {}
    if isinstance(model.config, ModelConfig) and any(p.startswith("head/") for p in wanted):
        new = model.draw(seed, "head/")
        wanted = {path: x for path, x in wanted.items() if path not in new}
    rest = {path: x for path, x in wanted.items() if path not in model.packed}
    base = new | pretrained.read_params(source, model.config, rest)
    for path in model.packed:  # one at a time: floats of all of them may not fit
        one = pretrained.read_params(source, model.config, {path: wanted[path]})
        base |= model.stored(one)
    if not config.checkpoint:
        return model.with_adapters(base, seed)
    abstract = {path: x for path, x in model.abstract().items() if lora.is_adapter(path)}
    folder = pathlib.Path(config.checkpoint).expanduser()
    return {**base, **hf.read_params(folder, names, abstract, hf.ADAPTER)}


def origin(lora: LoraConfig) -> str:
    """Where a run's adapters come from, and what of their input is dropped in training."""
    folder = pathlib.Path(lora.checkpoint).expanduser()
    return f"adapters from {folder}" + f", with dropout {lora.dropout:g}" * (lora.dropout > 0)


def export(
    workdir: pathlib.Path,
    output: pathlib.Path,
    params: Params,
    model: Model,
    merged: bool = False,
    dtype: str = "",
    picture_pixels: tuple[int, int] = (0, 0),
) -> dict[str, Any]:
    """Write a run's weights: its adapters as a PEFT folder, or the whole checkpoint.

    Args:
        workdir: of the run.
        output: a new folder.
        params: all of them.
        model: of the run.
        merged: add the adapters to the weights, and write the checkpoint.
        dtype: ``float32``, ``bfloat16`` or ``float16``; "" is float32 for adapters, and each
            tensor's own for a checkpoint.
        picture_pixels: bounds that the run had pictures scaled to (``data.picture_pixels``), for
            the checkpoint's processor.

    Returns:
        How many ``tensors`` and ``bytes`` were written.

    Raises:
        ConfigError: as :func:`jaxvlm.build.exporting.exported`; or there is nothing to merge.
    """
    if merged and not model.adapted:
        raise ConfigError(f"--merged: the run in {workdir} has no adapters; leave it out")
    if "head/project" in model.shapes:
        raise ConfigError(
            f"the run in {workdir} has a linear map behind its states (config.vectors.dim), and a "
            "Hugging Face folder of this family has no place for it"
        )
    source = exporting.exported(workdir, output, model.config, dtype)
    sentences.check_written(pretrained.modules(source.files))
    if merged or not model.adapted:
        whole = model.merged(params)
        more = functools.partial(exporting.tell_bounds, picture_pixels=picture_pixels)
        return exporting.rewrite(source, output, whole, model.config, dtype, more)
    base, names = source.family.weights(model.config), _names(source, model)
    kind, shapes = exporting.DTYPES[dtype or "float32"], names.tensors()
    layout = {
        theirs: hf.Stored(hf.ADAPTER, kind, shapes[name])
        for name, theirs in peft.spelled(shapes, base).items()
    }
    document = peft.config_to_peft(model.config.lora, base, model.adapted, model.config.checkpoint)
    with exporting.new_folder(output) as half:
        if not jax.process_index():
            text = json.dumps(document, indent=2) + "\n"
            (half / peft.CONFIG).write_text(text, encoding="utf-8")
        hf.write_params(half, params, names, layout)
    size = sum(int(np.prod(s.shape)) * hf.DTYPES[kind].itemsize for s in layout.values())
    return {"tensors": len(layout), "bytes": size}


def _names(source: Source, model: Model) -> Any:
    base = source.family.weights(model.config)
    return peft.weights(model.config.lora, base, model.adapted)


def _kept(workdir: pathlib.Path | None, checkpoint: str) -> LoraConfig | None:
    if workdir is None or not (workdir / "config.json").is_file():
        return None
    kept = record.read_config(workdir).model.lora
    return kept if kept.checkpoint == checkpoint else None


def _read_config(folder: pathlib.Path, base: Any) -> LoraConfig:
    if not folder.is_dir():
        raise ConfigError(f"config.model.lora.checkpoint={folder}: no such folder")
    found = pretrained.json_object(folder / peft.CONFIG, "give a PEFT adapter's folder")
    if not (folder / hf.ADAPTER).is_file():
        raise ConfigError(
            f"{folder} has no {hf.ADAPTER}; save it as safetensors (.bin files are pickles, which "
            "are never read)"
        )
    return peft.config_from_peft(found, hf.read_layout(folder, hf.ADAPTER), base, str(folder))


def _merged(given: LoraConfig, found: LoraConfig) -> LoraConfig:
    """The folder's adapters, unless a recipe says otherwise."""
    unset = LoraConfig()
    for field in ("rank", "alpha", "rslora", "dora", "targets"):
        value, of_file = getattr(given, field), getattr(found, field)
        if value not in (getattr(unset, field), of_file):
            raise ConfigError(
                f"config.model.lora.{field}={value!r}, but {given.checkpoint} says {of_file!r}; "
                "leave it out"
            )
    found = dataclasses.replace(found, dropout=given.dropout or found.dropout)
    return dataclasses.replace(found, checkpoint=given.checkpoint, base=given.base, init=given.init)
