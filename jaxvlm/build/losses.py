"""Losses by name: what ``config.loss`` may be."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh

from jaxvlm.config import ConfigError, PairLossConfig, TrainConfig
from jaxvlm.losses.contrastive import InfoNCE
from jaxvlm.losses.matryoshka import Matryoshka
from jaxvlm.losses.next_token import NextToken
from jaxvlm.losses.quantized import Quantized
from jaxvlm.losses.ranking import CoSENT, CosineRegression, Distill, MarginMSE, Triplet
from jaxvlm.losses.sigmoid import Sigmoid
from jaxvlm.types import Loss

Made = Callable[..., Loss]
_SOFTMAX = (
    *("temperature", "max_scale", "similarity", "directions", "partition", "negatives"),
    *("mask", "margin", "chunk"),
)
PAIR_LOSSES: dict[str, tuple[Made, tuple[str, ...]]] = {
    "info_nce": (InfoNCE, _SOFTMAX),
    "sigmoid": (Sigmoid, ("similarity", "chunk")),
    "triplet": (Triplet, ("margin", "distance")),
    "cosine": (CosineRegression, ()),
    "cosent": (lambda temperature: CoSENT(1.0 / temperature), ("temperature",)),
    "margin_mse": (MarginMSE, ("similarity",)),
    "distill": (Distill, ("similarity", "temperature", "teacher_temperature")),
}
"""Of vectors: name -> what makes it, and the fields of ``config.pair_loss`` that it reads."""
_ON_A_MESH = ("info_nce", "sigmoid")
_OF_ALL = ("dims", "dim_weights", "precisions")
LOSSES: dict[str, Callable[[TrainConfig], Loss]] = {
    "next_token": lambda config: NextToken(config.loss_chunk, config.router_loss),
}
"""Of tokens: name -> a function that makes the loss from the run's settings."""


def of_vectors(config: TrainConfig) -> bool:
    """Whether the run trains vectors of pairs, not tokens."""
    return config.loss in PAIR_LOSSES


def check_name(config: TrainConfig) -> None:
    """Refuse a name that no loss has: what the data must hold depends on it."""
    known = {**LOSSES, **PAIR_LOSSES}
    if config.loss not in known:
        raise ConfigError(f"config.loss={config.loss!r}; known: {', '.join(known)}")


def make_loss(config: TrainConfig, mesh: Mesh | None = None) -> Loss:
    """The loss that ``config.loss`` names.

    Args:
        config: of the run.
        mesh: that it runs on; ``None``: one device.

    Raises:
        ConfigError: an unknown name, a setting that it does not read, or a loss of what the model
            does not have.
    """
    check_name(config)
    decoder = config.model.decoder
    if config.router_loss and (of_vectors(config) or not decoder.num_experts):
        why = (
            f"config.loss={config.loss!r} has no such term"
            if decoder.num_experts
            else ("there is no router where config.model.decoder.num_experts=0")
        )
        raise ConfigError(f"config.router_loss={config.router_loss}: {why}")
    if of_vectors(config):
        return _of_pairs(config, mesh)
    if config.loss == "next_token" and not decoder.head:
        raise ConfigError(
            "config.loss='next_token': a model without an output matrix "
            "(config.model.decoder.head=False) predicts no token"
        )
    _refuse_unread(config, ())
    return LOSSES[config.loss](config)


def _of_pairs(config: TrainConfig, mesh: Mesh | None) -> Loss:
    make, fields = PAIR_LOSSES[config.loss]
    _refuse_unread(config, (*fields, *_OF_ALL))
    if config.loss_chunk:
        raise ConfigError(
            f"config.loss_chunk={config.loss_chunk} is of config.loss='next_token'; that of "
            "similarities is config.pair_loss.chunk"
        )
    asked = config.pair_loss
    given: dict[str, Any] = {field: getattr(asked, field) for field in fields}
    if asked.precisions and config.encoder == "vlm" and config.vectors.pool == "tokens":
        raise ConfigError(
            f"config.pair_loss.precisions={asked.precisions} are of one vector an item, not of a "
            "vector a token (config.vectors.pool='tokens')"
        )
    if config.loss == "triplet" and not asked.margin:
        raise ConfigError("config.loss='triplet' needs config.pair_loss.margin above 0")
    if config.loss == "cosent" and asked.temperature <= 0:
        raise ConfigError(f"config.pair_loss.temperature={asked.temperature} must be above 0")
    if config.loss in _ON_A_MESH:
        given["mesh"] = mesh
    try:
        loss = make(**given)
        loss = Quantized(loss, asked.precisions) if asked.precisions else loss
        return Matryoshka(loss, asked.dims, asked.dim_weights) if asked.dims else loss
    except ConfigError as error:
        raise ConfigError(f"config.pair_loss.{error}") from None


def _refuse_unread(config: TrainConfig, read: tuple[str, ...]) -> None:
    for field in dataclasses.fields(PairLossConfig):
        value = getattr(config.pair_loss, field.name)
        unread = field.name not in read or (
            field.name == "dim_weights" and not config.pair_loss.dims
        )
        if unread and value != field.default:
            raise ConfigError(
                f"config.pair_loss.{field.name}={value!r} is not read by "
                f"config.loss={config.loss!r}"
                + (" without config.pair_loss.dims" if field.name in read else "")
            )
