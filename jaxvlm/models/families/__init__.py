"""The model families of Hugging Face checkpoints: one file each, chosen by ``model_type``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from jaxvlm.config import ConfigError, ModelConfig
from jaxvlm.models.families import (
    gemma3,
    idefics3,
    internvl,
    llava,
    llava_next,
    paligemma,
    qwen_vl,
)
from jaxvlm.types import ChatStyle, Span, TileGrid, WeightMap


@runtime_checkable
class Family(Protocol):
    """What a family's file has."""

    def config_from_hf(self, hf_config: Mapping[str, Any]) -> ModelConfig:
        """The model that a ``config.json`` describes."""
        ...

    def weights(self, config: ModelConfig) -> WeightMap:
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


def family(hf_config: Mapping[str, Any], where: str) -> Family:
    """The family of a ``config.json``.

    Args:
        hf_config: the file's content.
        where: its folder, for the message.

    Raises:
        ConfigError: none is known for its ``model_type``.
    """
    kind = hf_config.get("model_type")
    if kind not in FAMILIES:
        raise ConfigError(
            f"{where}: model_type={kind!r} is no family of jaxvlm; known: {', '.join(FAMILIES)}"
        )
    return FAMILIES[kind]
