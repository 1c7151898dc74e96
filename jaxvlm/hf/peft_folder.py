"""PEFT adapter folders: reads adapters that a run starts from, and exports a run's adapters."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from typing import Any

import jax
import numpy as np

from jaxvlm.checkpoint import run_record
from jaxvlm.config import (
    Config,
    ConfigError,
    DataConfig,
    LoraConfig,
    ModelConfig,
    refuse_changed,
)
from jaxvlm.hf import exporter, pretrained, safetensors
from jaxvlm.hf.families import peft_adapters, sentences
from jaxvlm.hf.pretrained import Source
from jaxvlm.models import lora
from jaxvlm.spmd.model import Model
from jaxvlm.types import Params

_DEFAULT = DataConfig()


def with_adapter(config: Config, source: Source | None, workdir: pathlib.Path | None) -> Config:
    """Fill in rank, scale, variant and targets of the adapters from an adapter's folder.

    Args:
        config: settings of the run, with the checkpoint's dims filled in.
        source: the checkpoint that is adapted.
        workdir: workdir of the run; its record takes precedence, so that the run can be resumed
            without the adapter's folder.

    Raises:
        ConfigError: the folder has no adapter, or one that does not fit the model or the settings.
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
    result = given
    base = source.family.weights(config.model)
    if given.checkpoint:
        recorded = _recorded(workdir, given.checkpoint)
        folder = pathlib.Path(given.checkpoint).expanduser()
        result = _merged(given, recorded or _read_config(folder, base))
    elif given.rank and lora.ALL in given.targets:
        without = tuple("-" + path for path in peft_adapters.not_layers(base))
        result = dataclasses.replace(given, targets=given.targets + without)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, lora=result))


def read_params(source: Source, model: Model, seed: int) -> Params:
    """Read a checkpoint's parameters, and read or initialize adapters.

    The embedding head of a vision-language model is in no checkpoint, and is initialized.

    Args:
        source: the checkpoint.
        model: the model; ``config.lora.checkpoint`` names the adapters' folder, "" is none.
        seed: seed of initial adapters and embedding head.

    Raises:
        ConfigError: tensors that are missing, extra or of another shape.
    """
    config = model.config.lora
    names = _names(source, model)  # raises now, not only at export
    source = pretrained.with_weights(source, model.config.checkpoint)
    safetensors.check_copies(source.weights, source.family.weights(model.config))
    wanted, new = model.base(), {}
    if isinstance(model.config, ModelConfig) and any(p.startswith("head/") for p in wanted):
        new = model.draw(seed, "head/")
        wanted = {path: x for path, x in wanted.items() if path not in new}
    rest = {path: x for path, x in wanted.items() if path not in model.packed}
    base = new | pretrained.read_params(source, model.config, rest)
    for path in model.packed:  # one at a time: floats of all of them may not fit in memory
        one = pretrained.read_params(source, model.config, {path: wanted[path]})
        base |= model.stored(one)
    if not config.checkpoint:
        return model.with_adapters(base, seed)
    abstract = {path: x for path, x in model.abstract().items() if lora.is_adapter(path)}
    folder = pathlib.Path(config.checkpoint).expanduser()
    return {**base, **safetensors.read_params(folder, names, abstract, safetensors.ADAPTER)}


def origin(lora: LoraConfig) -> str:
    """Describe where a run's adapters come from, and the dropout of their input in training."""
    folder = pathlib.Path(lora.checkpoint).expanduser()
    return f"adapters from {folder}" + f", with dropout {lora.dropout:g}" * (lora.dropout > 0)


def export(
    workdir: pathlib.Path,
    output: pathlib.Path,
    params: Params,
    model: Model,
    merged: bool = False,
    dtype: str = "",
    data: DataConfig = _DEFAULT,
) -> dict[str, Any]:
    """Export a run's adapters as a PEFT folder, or its weights as a checkpoint.

    Args:
        workdir: workdir of the run.
        output: a new folder.
        params: all parameters.
        model: the run's model.
        merged: merge the adapters into the weights, and write a checkpoint.
        dtype: ``float32``, ``bfloat16`` or ``float16``; "" is float32 for adapters, and each
            tensor's own for a checkpoint.
        data: the run's, for the checkpoint's processors of images and videos.

    Returns:
        The number of ``tensors`` and ``bytes`` written.

    Raises:
        ConfigError: as :func:`jaxvlm.hf.exporter.exported`; or the run has no adapters to merge.
    """
    if merged and not model.adapted:
        raise ConfigError(f"--merged: the run in {workdir} has no adapters; leave it out")
    if "head/project" in model.shapes:
        raise ConfigError(
            f"the run in {workdir} has a linear map after its hidden states "
            "(config.embedding.dim), and a Hugging Face folder of this family has no tensor for it"
        )
    source = exporter.exported(workdir, output, model.config, dtype)
    sentences.check_written(pretrained.modules(source.files))
    if merged or not model.adapted:
        merged_params = model.merged(params)
        more = functools.partial(exporter.write_preprocessing, data=data)
        return exporter.rewrite(source, output, merged_params, model.config, dtype, more)
    base, names = source.family.weights(model.config), _names(source, model)
    kind, shapes = exporter.DTYPES[dtype or "float32"], names.tensors()
    layout = {
        theirs: safetensors.Stored(safetensors.ADAPTER, kind, shapes[name])
        for name, theirs in peft_adapters.spelled(shapes, base).items()
    }
    document = peft_adapters.config_to_peft(
        model.config.lora, base, model.adapted, model.config.checkpoint
    )
    with exporter.new_folder(output) as partial:
        if not jax.process_index():
            text = json.dumps(document, indent=2) + "\n"
            (partial / peft_adapters.CONFIG).write_text(text, encoding="utf-8")
        safetensors.write_params(partial, params, names, layout)
    size = sum(int(np.prod(s.shape)) * safetensors.DTYPES[kind].itemsize for s in layout.values())
    return {"tensors": len(layout), "bytes": size}


def _names(source: Source, model: Model) -> Any:
    base = source.family.weights(model.config)
    return peft_adapters.weights(model.config.lora, base, model.adapted)


def _recorded(workdir: pathlib.Path | None, checkpoint: str) -> LoraConfig | None:
    if workdir is None or not run_record.has_checkpoint(workdir):
        return None
    recorded = run_record.read_config(workdir).model.lora
    return recorded if recorded.checkpoint == checkpoint else None


def _read_config(folder: pathlib.Path, base: Any) -> LoraConfig:
    if not folder.is_dir():
        raise ConfigError(f"config.model.lora.checkpoint={folder}: no such folder")
    fields = pretrained.json_object(folder / peft_adapters.CONFIG, "give a PEFT adapter's folder")
    if not (folder / safetensors.ADAPTER).is_file():
        raise ConfigError(
            f"{folder} has no {safetensors.ADAPTER}; save it as safetensors (.bin files are "
            "pickles, which are never read)"
        )
    return peft_adapters.config_from_peft(
        fields, safetensors.read_layout(folder, safetensors.ADAPTER), base, str(folder)
    )


def _merged(given: LoraConfig, folder: LoraConfig) -> LoraConfig:
    """Combine the settings of an adapter's folder with those of a recipe."""
    unset = LoraConfig()
    refuse_changed(given, ["init"], "config.model.lora", f"with checkpoint={given.checkpoint!r}")
    for field in ("rank", "alpha", "rslora", "dora", "targets"):
        value, of_file = getattr(given, field), getattr(folder, field)
        if value not in (getattr(unset, field), of_file):
            raise ConfigError(
                f"config.model.lora.{field}={value!r}, but {given.checkpoint} says {of_file!r}; "
                "leave it out"
            )
    result = dataclasses.replace(folder, dropout=given.dropout or folder.dropout)
    return dataclasses.replace(result, checkpoint=given.checkpoint, base=given.base)
