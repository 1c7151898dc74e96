"""Where a run lies: its mesh, its model on it, and a vision encoder on devices of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxvlm.config import Config, ConfigError, EncoderConfig, OptimConfig
from jaxvlm.hf import frozen_dtypes
from jaxvlm.losses.registry import trains_embeddings
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.strategies import resolve
from jaxvlm.spmd import disaggregated_encoder, encoder_share
from jaxvlm.spmd.model import Model, build_model
from jaxvlm.spmd.train_step import split
from jaxvlm.trainer.checks import check_lengths
from jaxvlm.trainer.inputs import Prepared
from jaxvlm.trainer.training import check_shards
from jaxvlm.trainer.unreached import MODALITIES, freeze_unreached


class Layout(NamedTuple):
    """Devices and their mesh, before there is a model."""

    config: Config
    """With the mesh's axes and the strategy's fields filled in."""
    mesh: jax.sharding.Mesh
    encoder_devices: list[jax.Device]
    """Devices of a disaggregated vision encoder; ``[]``: it lies on ``mesh``."""


class Placed(NamedTuple):
    """A layout with the model on it."""

    config: Config
    mesh: jax.sharding.Mesh
    model: Model
    encoder: Model | None
    """The vision encoder on devices of its own."""


def is_by_cost(config: Config) -> bool:
    """Whether the first batch decides how many devices the vision encoder gets."""
    return config.encoder.devices == encoder_share.BY_COST


def lay_out(config: Config, devices: Sequence[jax.Device]) -> Layout:
    """Make the mesh.

    Raises:
        ConfigError: the mesh or the strategy does not fit the devices.
    """
    encoder_devices: list[jax.Device] = []
    if config.encoder != EncoderConfig():
        encoder_devices, devices = disaggregated_encoder.divide_devices(config.encoder, devices)
    if encoder_devices and config.strategy.name == "single" and len(devices) > 1:
        raise ConfigError(
            "config.strategy.name='single' runs on one device, and "
            f"config.encoder.devices={len(encoder_devices)} leaves {len(devices)}: take 'ddp'"
        )
    mesh, strategy = resolve(config.strategy, config.mesh, devices)
    config = dataclasses.replace(config, mesh=mesh, strategy=strategy)
    check_lengths(config)
    jax_mesh = make_mesh(mesh, devices[:1] if strategy.name == "single" else devices)
    return Layout(config, jax_mesh, encoder_devices)


def place(
    config: Config,
    layout: Layout | None,
    devices: Sequence[jax.Device],
    prepared: Prepared,
    workdir: pathlib.Path | None,
    log: Callable[[str], None],
) -> Placed:
    """Build the model where it lies: on ``layout``, or on one chosen by :func:`place_by_cost`.

    Towers that no record of the data reaches are frozen, and frozen weights are held as
    ``config.optim.frozen_dtype`` says; ``log`` takes lines for people.
    """
    dataset = prepared.dataset
    if layout:
        placed = place_model(config, layout)
    else:
        placed = place_by_cost(config, devices, dataset, log)
    if not dataset.modalities >= MODALITIES:
        config = freeze_unreached(placed.config, placed.model, dataset, log)
        placed = placed._replace(config=config)
    return _hold_frozen(placed, prepared, workdir)


def _hold_frozen(placed: Placed, prepared: Prepared, workdir: pathlib.Path | None) -> Placed:
    """Hold frozen weights in the dtypes of the files that they are read from, or as is set.

    Raises:
        ConfigError: as :func:`jaxvlm.hf.frozen_dtypes.hold`.
    """
    config, model = placed.config, placed.model
    frozen = split(model, model.shapes, config.optim.frozen)[1]
    if not frozen and config.optim.frozen_dtype == OptimConfig().frozen_dtype:
        return placed
    dual, whole = prepared.dual, {"": prepared.source} if prepared.source else {}
    sources = (dual.towers or whole) if dual else whole
    tower_of_run = dual.of_run if dual else None

    def of_files() -> frozen_dtypes.Dtypes:
        return frozen_dtypes.of_run(config, sources, workdir, tower_of_run)

    model = frozen_dtypes.hold(model, config.optim, of_files)
    encoder = placed.encoder and placed.encoder.holding(model.held)
    return placed._replace(model=model, encoder=encoder)


def place_model(config: Config, layout: Layout) -> Placed:
    """Build the model on its mesh; allocates nothing.

    Args:
        config: the layout's settings, with the model's dims filled in.
        layout: from :func:`lay_out`.

    Raises:
        ConfigError: dims that the mesh does not divide, or a batch that the shards do not divide.
    """
    embeddings = config.embedding if trains_embeddings(config) else None
    model: Model = build_model(
        config.network, layout.mesh, config.strategy, not layout.encoder_devices, embeddings
    )
    encoder = None
    if layout.encoder_devices:
        encoder = disaggregated_encoder.encoder_on_devices(
            model, config.encoder, layout.encoder_devices
        )
    check_shards(config, model, encoder)
    return Placed(config, layout.mesh, model, encoder)


def place_by_cost(
    config: Config, devices: Sequence[jax.Device], dataset: Any, log: Callable[[str], None]
) -> Placed:
    """Give the vision encoder its share of the devices by FLOPs, or the nearest usable share.

    Args:
        config: of the run.
        devices: of the run.
        dataset: whose first batch the FLOPs are counted on.
        log: takes lines for people.

    Raises:
        ConfigError: no share can be used.
    """
    rows = np.arange(config.data.batch_size)
    with contextlib.closing(dataset.train(rows, 0)) as batches:
        cost = encoder_share.model_costs(config, next(batches)[0])
    if len(devices) < 2 or not cost.encoder:
        what = "one device" if len(devices) < 2 else "a first batch without images"
        raise ConfigError(f"config.encoder.devices=-1 with {what}: leave it at 0")
    refused: dict[int, str] = {}
    for count in encoder_share.best_first(cost, len(devices)):
        encoder = dataclasses.replace(config.encoder, devices=count)
        try:
            layout = lay_out(dataclasses.replace(config, encoder=encoder), devices)
            placed = place_model(layout.config, layout)
        except ConfigError as error:
            refused[count] = str(error)
            continue
        share = cost.encoder / sum(cost)
        log(
            f"config.encoder.devices={count} of {len(devices)}: the vision encoder has "
            f"{share:.0%} of a step's FLOPs" + (f" ({_reasons(refused)})" if refused else "")
        )
        return placed
    raise ConfigError(
        f"config.encoder.devices=-1: no share of {len(devices)} devices can be used; "
        + _reasons(refused)
    )


def _reasons(refused: dict[int, str]) -> str:
    """Each reason once, whatever numbers it holds, with the device counts that it refused."""
    like: dict[str, list[int]] = {}
    for count, why in refused.items():
        like.setdefault(re.sub(r"\d+", "", why), []).append(count)
    return "; ".join(
        f"with {', '.join(map(str, counts))}: {refused[counts[0]]}" for counts in like.values()
    )
