"""The model families of Hugging Face checkpoints: one file each, chosen by ``model_type``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from jaxvlm.config import ConfigError, ModelConfig
from jaxvlm.models.families import gemma3, idefics3, internvl, llava, paligemma
from jaxvlm.models.families.names import NameMap
from jaxvlm.types import ChatStyle, Span


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
    ) -> Callable[[int, int], Span]:
        """(width, height) of a picture -> its tokens; ``encode`` gives the ids of a text."""
        ...


FAMILIES: dict[str, Any] = {
    "llava": llava,
    "paligemma": paligemma,
    "gemma3": gemma3,
    "internvl": internvl,
    "idefics3": idefics3,
    "smolvlm": idefics3,
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
