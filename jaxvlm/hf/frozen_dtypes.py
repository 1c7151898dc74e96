"""The dtypes in which frozen weights are held: those of the files that they are read from."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxvlm.checkpoint import run_folder, run_record
from jaxvlm.config import (
    Config,
    ConfigError,
    DualConfig,
    ModelConfig,
    OptimConfig,
    check_choice,
)
from jaxvlm.hf import exporter, pretrained, safetensors
from jaxvlm.hf.families import config_reader, sentences
from jaxvlm.hf.families.name_map import NameMap
from jaxvlm.models import frozen_blocks
from jaxvlm.models.lora import is_adapter
from jaxvlm.spmd.model import Model
from jaxvlm.spmd.train_step import split

CHECKPOINT = "checkpoint"
"""Value of ``OptimConfig.frozen_dtype`` that keeps the dtypes of the files."""
_CHOICES = (CHECKPOINT, "bfloat16", "float32")
_SETTING = "config.optim.frozen_dtype"
Dtypes = dict[str, Any]
"""Parameter -> dtype of floats."""


def hold(model: Model, optim: OptimConfig, of_files: Callable[[], Dtypes]) -> Model:
    """Return the model with its frozen weights in the dtypes that they are held in.

    Adapters, and maps in eight bits with their scales, are left as they are.

    Args:
        model: on its mesh.
        optim: the run's settings of the optimizer.
        of_files: returns the dtypes of the files that weights are read from; called only if a
            frozen weight's dtype depends on them.

    Raises:
        ConfigError: an unknown setting, or one for frozen weights where there are none.
    """
    setting = optim.frozen_dtype
    check_choice(_SETTING, setting, _CHOICES)
    fixed = split(model, model.shapes, optim.frozen)[1]
    paths = (model.base().keys() & fixed.keys()) - model.packed.keys()
    if setting != CHECKPOINT:
        if not paths:
            raise ConfigError(
                f"{_SETTING}={setting!r} is not read: no weight is frozen that is not quantized; "
                "leave it out"
            )
        return model.holding(dict.fromkeys(paths, setting))
    found = of_files() if paths else {}
    return model.holding({path: found[path] for path in paths & found.keys()})


def of_run(
    config: Config,
    sources: Mapping[str, pretrained.Source],
    workdir: pathlib.Path | None = None,
    tower_of_run: pathlib.Path | None = None,
) -> Dtypes:
    """Return the dtype of each weight in the files that a run reads it from.

    A weight of another run (``config.init_from``) has the dtype that it was saved in: float32 where
    that run trained it. Once the run has a checkpoint of its own, the other run is not read.

    Args:
        config: of the run.
        sources: "" -> the checkpoint of the whole model, or tower -> the tower's checkpoint.
        workdir: of the run.
        tower_of_run: workdir of the run that a dual encoder's vision tower is from.
    """
    found: Dtypes = {}
    run = config.init_from or tower_of_run
    if workdir or run:
        from jaxvlm.checkpoint.restore import saved_params  # takes half a second, which plans save

        saved = saved_params(run_record.checkpoints_of(workdir)) if workdir else {}
        if run and not saved:
            begun = run_folder.local_to_read(run, "config.init_from")
            saved = _recut(saved_params(run_record.checkpoints_of(begun)), config.network)
        found = {path: x.dtype for path, x in saved.items()}
    if not config.init_from:
        for tower, source in sources.items():
            found |= of_source(source, config.network, tower)
    return found


def _recut(
    params: dict[str, jax.ShapeDtypeStruct], network: ModelConfig | DualConfig
) -> dict[str, jax.ShapeDtypeStruct]:
    """Split a vision encoder at the run's own frozen blocks, where that is possible."""
    if any(map(is_adapter, params)):
        return params
    return jax.eval_shape(lambda p: frozen_blocks.recut(p, network.vision.frozen_blocks), params)


def of_source(
    source: pretrained.Source, network: ModelConfig | DualConfig, tower: str = ""
) -> Dtypes:
    """Return the dtype of each parameter in a Hugging Face checkpoint.

    Args:
        source: the checkpoint, or a folder with its ``config.json`` alone, whose dtype is then
            taken.
        network: settings of the model.
        tower: the tower that is read from it; "" reads the whole model.

    Raises:
        ConfigError: tensors that are missing or extra.
    """
    if tower:
        model = config_reader.model_of(source.family, source.hf_config)
        return _of_tensors(source, source.family.weights(model).part(tower), source.weights)
    found = _of_tensors(source, source.family.weights(network), source.weights)
    place = sentences.place(pretrained.modules(source.files), sentences.DENSE)
    if isinstance(network, DualConfig) and place and (source.weights / place).is_dir():
        found |= _of_tensors(source, sentences.linear_map(network), source.weights / place)
    return found


def _of_tensors(source: pretrained.Source, weights: NameMap, folder: pathlib.Path) -> Dtypes:
    """The dtype of each parameter's tensors; of several, one that holds the values of all."""
    layout = _layout(source, folder)
    if layout is None:
        return dict.fromkeys(weights.by_path(), _declared(source.hf_config))
    found = {name: stored.shape for name, stored in layout.items()}
    spelled = weights.check(found, str(folder))
    result: Dtypes = {}
    for path, names in weights.fitting(found).by_path().items():
        kinds = {layout[spelled[name]].dtype for name in names}
        if kinds <= safetensors.DTYPES.keys():  # others are refused where they are read
            result[path] = jnp.result_type(*(safetensors.DTYPES[kind] for kind in kinds))
    return result


def _layout(source: pretrained.Source, folder: pathlib.Path) -> safetensors.Layout | None:
    """The tensors of a checkpoint's folder; ``None`` where there are no weights."""
    if folder == source.weights and (source.files / pretrained.LAYOUT).is_file():
        return exporter.saved_layout(source)
    if any((folder / name).is_file() for name in (safetensors.SINGLE, safetensors.INDEX)):
        return safetensors.read_layout(folder)
    return None


def _declared(hf_config: Mapping[str, Any]) -> Any:
    """The dtype that a ``config.json`` says its weights have; transformers' default is float32."""
    groups = [g for g in (hf_config, hf_config.get("text_config")) if isinstance(g, Mapping)]
    names = [group.get(key) for group in groups for key in ("dtype", "torch_dtype")]
    return next((name for name in names if name in exporter.DTYPES), "float32")
