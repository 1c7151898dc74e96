"""The training loss of a run, from ``config.loss``: a built-in one, or one of the user's own."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection
from typing import Any

from jax.sharding import Mesh

from jaxvlm.config import Config, ConfigError, PairLossConfig, extension, refuse_changed
from jaxvlm.losses.contrastive import InfoNCE
from jaxvlm.losses.custom_loss import CustomLoss
from jaxvlm.losses.matryoshka import Matryoshka
from jaxvlm.losses.next_token import NextToken
from jaxvlm.losses.quantized_embeddings import QuantizedEmbeddings
from jaxvlm.losses.ranking import CoSENT, CosineRegression, Distill, MarginMSE, Triplet
from jaxvlm.losses.sigmoid import Sigmoid
from jaxvlm.parallel.rules import VOCABULARY_AXES
from jaxvlm.types import Loss

MakeLoss = Callable[..., Loss]
_SOFTMAX = (
    *("temperature", "max_scale", "similarity", "directions", "softmax_scope", "negatives_from"),
    *("false_negative_filter", "margin", "tile_size", "mesh"),
)
_TILE = 256
"""Columns of a tile of the matrix unit of a TPU v6e; 128 of earlier ones and of GPUs."""


def _next_token(loss_chunk: int, moe_aux_loss_weight: float, mesh: Mesh | None) -> NextToken:
    if mesh is None:
        return NextToken(loss_chunk, moe_aux_loss_weight)
    tile = 1 if mesh.devices.flat[0].platform == "cpu" else _TILE
    shards = math.prod(mesh.shape[axis] for axis in VOCABULARY_AXES)
    return NextToken(loss_chunk, moe_aux_loss_weight, tile, shards)


TOKEN_LOSSES: dict[str, tuple[MakeLoss, tuple[str, ...]]] = {
    "next_token": (_next_token, ("loss_chunk", "moe_aux_loss_weight", "mesh")),
}
"""Losses of conversations: name -> a function that makes the loss, and the common settings that it
reads, which are the function's arguments."""
PAIR_LOSSES: dict[str, tuple[MakeLoss, tuple[str, ...]]] = {
    "info_nce": (InfoNCE, _SOFTMAX),
    "sigmoid": (Sigmoid, ("similarity", "tile_size", "mesh")),
    "triplet": (Triplet, ("margin", "distance")),
    "cosine": (CosineRegression, ()),
    "cosent": (lambda temperature: CoSENT(1.0 / temperature), ("temperature",)),
    "margin_mse": (MarginMSE, ("similarity",)),
    "distill": (Distill, ("similarity", "temperature", "teacher_temperature")),
}
"""Losses of embeddings of pairs, in the same form."""
_EVERY_PAIR_LOSS = ("matryoshka_dims", "matryoshka_weights", "precisions")
_TOKEN_SETTINGS = ("loss_chunk", "moe_aux_loss_weight")
_PAIR_SETTINGS = tuple(field.name for field in dataclasses.fields(PairLossConfig))


def trains_embeddings(config: Config) -> bool:
    """Whether the run trains embeddings of pairs, not tokens.

    The settings of a trained run say so, and its loss is not imported.

    Raises:
        ConfigError: ``config.loss.target`` can't be imported.
    """
    if config.loss.target:
        if (recorded := getattr(config.loss, "trains_embeddings", None)) is not None:
            return bool(recorded)
        return bool(getattr(_target(config), "trains_embeddings", False))
    return config.loss.name in PAIR_LOSSES


def loss_setting(config: Config) -> str:
    """The setting that chose the loss, for messages: ``config.loss.name='next_token'``."""
    name = "target" if config.loss.target else "name"
    return f"config.loss.{name}={getattr(config.loss, name)!r}"


def check_loss_name(config: Config) -> None:
    """Refuse a name that no loss has: what the data must hold depends on it.

    Raises:
        ConfigError: no built-in loss has the name, or the user's own can't be imported.
    """
    if extension.is_set(config.loss, "config.loss"):
        if config.loss.name != type(config.loss)().name:
            raise ConfigError(
                f"config.loss.name={config.loss.name!r} is not read with "
                f"config.loss.target={config.loss.target!r}; leave one of them out"
            )
        _target(config)
        return
    known = {**TOKEN_LOSSES, **PAIR_LOSSES}
    if config.loss.name not in known:
        raise ConfigError(
            f"config.loss.name={config.loss.name!r}; known: {', '.join(known)}; a loss of your own "
            "is named by config.loss.target=FILE.py:CLASS"
        )


def make_loss(config: Config, mesh: Mesh | None = None) -> Loss:
    """The loss that ``config.loss`` names.

    Args:
        config: of the run.
        mesh: that it runs on; ``None``: one device.

    Raises:
        ConfigError: an unknown name, a setting that the loss does not read, or a loss that does
            not fit the model.
    """
    check_loss_name(config)
    common = {name: getattr(config, name) for name in _TOKEN_SETTINGS}
    common |= {name: getattr(config.pair_loss, name) for name in _PAIR_SETTINGS}
    common["mesh"] = mesh
    embeddings = trains_embeddings(config)
    _check_model(config, embeddings)
    make, reads = _chosen(config, common)
    _refuse_unread(config, (*reads, *(_EVERY_PAIR_LOSS if embeddings else ())))
    loss = make(**{name: common[name] for name in reads})
    return _wrapped(config, loss) if embeddings else loss


def _target(config: Config) -> Any:
    return extension.resolve(config.loss, "config.loss")


def _chosen(config: Config, common: Collection[str]) -> tuple[MakeLoss, tuple[str, ...]]:
    """What makes the loss, and the names in ``common`` that it reads."""
    if not config.loss.target:
        build, fields = {**TOKEN_LOSSES, **PAIR_LOSSES}[config.loss.name]
        return _of_pair_loss(build) if config.loss.name in PAIR_LOSSES else build, fields
    reads, what = tuple(getattr(_target(config), "reads", ())), loss_setting(config)
    if unknown := [name for name in reads if name not in common]:
        raise ConfigError(
            f"{what}: its `reads` names {unknown[0]!r}, which is no common setting of losses; "
            f"known: {', '.join(common)}"
        )

    def make(**settings: Any) -> Loss:
        return CustomLoss.of(extension.make(config.loss, "config.loss", settings), what)

    return make, reads


def _of_pair_loss(make: MakeLoss) -> MakeLoss:
    """``make`` with errors that say that its arguments are settings of ``config.pair_loss``."""

    def named(*args: Any, **settings: Any) -> Loss:
        try:
            return make(*args, **settings)
        except ConfigError as error:
            raise ConfigError(f"config.pair_loss.{error}") from None

    return named


def _wrapped(config: Config, loss: Loss) -> Loss:
    """A loss of pairs, for embeddings of lower precision and for prefixes of them too."""
    settings = config.pair_loss
    if settings.precisions:
        loss = _of_pair_loss(QuantizedEmbeddings)(loss, settings.precisions)
    if settings.matryoshka_dims:
        dims, weights = settings.matryoshka_dims, settings.matryoshka_weights
        loss = _of_pair_loss(Matryoshka)(loss, dims, weights)
    return loss


def _check_model(config: Config, embeddings: bool) -> None:
    """Refuse a loss of what the model does not have."""
    decoder, pair_loss = config.model.decoder, config.pair_loss
    if config.moe_aux_loss_weight and not decoder.num_experts:
        raise ConfigError(
            f"config.moe_aux_loss_weight={config.moe_aux_loss_weight}: there is no router where "
            "config.model.decoder.num_experts=0"
        )
    if not embeddings and not decoder.head:
        raise ConfigError(
            f"{loss_setting(config)}: a model without an output matrix "
            "(config.model.decoder.head=False) predicts no token"
        )
    per_token = config.embedder == "vlm" and config.embedding.pool == "tokens"
    if embeddings and pair_loss.precisions and per_token:
        raise ConfigError(
            f"config.pair_loss.precisions={pair_loss.precisions} are of one embedding an item, not "
            "of an embedding a token (config.embedding.pool='tokens')"
        )
    if config.loss.target:
        return
    if config.loss.name == "triplet" and not pair_loss.margin:
        raise ConfigError("config.loss.name='triplet' needs config.pair_loss.margin above 0")
    if config.loss.name == "cosent" and pair_loss.temperature <= 0:
        raise ConfigError(f"config.pair_loss.temperature={pair_loss.temperature} must be above 0")
    is_sigmoid = config.loss.name == "sigmoid"
    tempered = embeddings and "max_scale" in PAIR_LOSSES[config.loss.name][1]
    why = f"by {loss_setting(config)}"
    if not is_sigmoid:
        refuse_changed(config, ["embedding.learn_bias"], "config", why)
    if not is_sigmoid and (pair_loss.temperature or not tempered):
        why += f" with config.pair_loss.temperature={pair_loss.temperature}" * tempered
        refuse_changed(config, ["embedding.learn_scale"], "config", why)


def _refuse_unread(config: Config, reads: Collection[str]) -> None:
    """Refuse a common setting of losses that differs from its default and that no one reads."""
    groups = (
        ("config", config, _TOKEN_SETTINGS),
        ("config.pair_loss", config.pair_loss, _PAIR_SETTINGS),
    )
    for path, group, names in groups:
        for name in names:
            value = getattr(group, name)
            if name in reads or value == getattr(type(group)(), name):
                continue
            advice = "; a class names what it reads in `reads`" if config.loss.target else ""
            if name == "loss_chunk" and config.loss.name in PAIR_LOSSES:
                advice = "; that of similarities is config.pair_loss.tile_size"
            raise ConfigError(
                f"{path}.{name}={value!r} is not read by {loss_setting(config)}{advice}"
            )
    pair_loss = config.pair_loss
    if pair_loss.matryoshka_weights and not pair_loss.matryoshka_dims:
        raise ConfigError(
            f"config.pair_loss.matryoshka_weights={pair_loss.matryoshka_weights} is not read by "
            f"{loss_setting(config)} without config.pair_loss.matryoshka_dims"
        )
