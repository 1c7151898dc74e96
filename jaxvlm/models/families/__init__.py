"""The model families of Hugging Face checkpoints: one file each, chosen by ``model_type``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from jaxvlm.config import ConfigError, DualConfig, ModelConfig
from jaxvlm.models.families import (
    bert,
    dual,
    gemma3,
    idefics3,
    internvl,
    llava,
    llava_next,
    paligemma,
    qwen_vl,
)
from jaxvlm.models.families.names import NameMap
from jaxvlm.types import ChatStyle, Span, TextStyle, TileGrid


@runtime_checkable
class Family(Protocol):
    """What a family's file has."""

    def config_from_hf(self, hf_config: Mapping[str, Any]) -> ModelConfig:
        """The model that a ``config.json`` describes."""
        ...

    def weights(self, config: ModelConfig) -> NameMap:
        """Which tensors hold which parameters."""
        ...

    def chat_style(self, hf_config: Mapping[str, Any]) -> ChatStyle:
        """How pictures are written in a conversation."""
        ...

    def span(
        self,
        config: ModelConfig,
        hf_config: Mapping[str, Any],
        encode: Callable[[str], Sequence[int]],
        grid: TileGrid,
    ) -> Callable[[int, int], Span]:
        """(width, height) of a picture -> its tokens.

        ``encode`` gives the ids of a text, ``grid`` the tiles of a picture.
        """
        ...


@runtime_checkable
class EncoderFamily(Protocol):
    """What the file of a family of encoders has."""

    def config_from_hf(self, hf_config: Mapping[str, Any]) -> DualConfig:
        """The model that a ``config.json`` describes."""
        ...

    def weights(self, config: DualConfig) -> NameMap:
        """Which tensors hold which parameters."""
        ...

    def text_style(self, config: DualConfig, tokenizer_config: Mapping[str, Any]) -> TextStyle:
        """How texts become rows; ``tokenizer_config`` is of ``tokenizer_config.json``."""
        ...


FAMILIES: dict[str, Any] = {
    "llava": llava,
    "llava_next": llava_next,
    "llava_onevision": llava_next,
    "paligemma": paligemma,
    "gemma3": gemma3,
    "internvl": internvl,
    "idefics3": idefics3,
    "smolvlm": idefics3,
    "qwen2_vl": qwen_vl,
    "qwen2_5_vl": qwen_vl,
    "qwen3_vl": qwen_vl,
    "qwen3_vl_moe": qwen_vl,
}
"""``model_type`` of a ``config.json`` -> the family."""
ENCODERS: dict[str, Any] = {
    "clip": dual,
    "siglip": dual,
    "siglip2": dual,
    "clip_text_model": dual,
    "siglip_text_model": dual,
    "siglip2_text_model": dual,
    "bert": bert,
}
"""Likewise, of models that give vectors and no text."""


def family(hf_config: Mapping[str, Any], where: str) -> Family:
    """The family of a ``config.json``.

    Args:
        hf_config: the file's content.
        where: its folder, for the message.

    Raises:
        ConfigError: none is known for its ``model_type``.
    """
    kind = hf_config.get("model_type")
    if kind in ENCODERS:
        raise ConfigError(
            f"{where}: model_type={kind!r} is an encoder: it makes vectors (`jaxvlm embed`, "
            "`jaxvlm.load(folder).encode_text`), not text"
        )
    if kind not in FAMILIES:
        raise ConfigError(
            f"{where}: model_type={kind!r} is no family of jaxvlm; known: {', '.join(FAMILIES)}"
        )
    return FAMILIES[kind]


def any_family(hf_config: Mapping[str, Any], where: str) -> Any:
    """The :class:`Family` or :class:`EncoderFamily` of a ``config.json``; see :func:`family`."""
    return ENCODERS.get(hf_config.get("model_type", "")) or family(hf_config, where)
