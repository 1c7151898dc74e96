"""Model families of Hugging Face checkpoints: one module each, selected by ``model_type``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from jaxvlm.config import ConfigError, DualConfig, Extension, ModelConfig, extension
from jaxvlm.hf.families import (
    bert,
    dual_encoders,
    gemma3,
    idefics3,
    internvl,
    llava,
    llava_next,
    paligemma,
    qwen_vl,
)
from jaxvlm.hf.families.name_map import NameMap
from jaxvlm.types import ChatStyle, Span, TextStyle, TileGrid


@runtime_checkable
class Family(Protocol):
    """Functions of a vision-language family's module."""

    def config_from_hf(self, hf_config: Mapping[str, Any]) -> ModelConfig:
        """Read a model's settings from ``config.json``."""
        ...

    def weights(self, config: ModelConfig) -> NameMap:
        """Map all parameters to tensors."""
        ...

    def chat_style(self, hf_config: Mapping[str, Any]) -> ChatStyle:
        """Return how images are written in a conversation."""
        ...

    def span(
        self,
        config: ModelConfig,
        hf_config: Mapping[str, Any],
        encode: Callable[[str], Sequence[int]],
        grid: TileGrid,
    ) -> Callable[[int, int], Span]:
        """Return a function from an image's (width, height) to its tokens.

        Args:
            config: settings of the model.
            hf_config: content of ``config.json``.
            encode: returns the token ids of a text.
            grid: returns the tiles of an image.
        """
        ...


@runtime_checkable
class EncoderFamily(Protocol):
    """Functions of the module of a family of encoders."""

    def config_from_hf(self, hf_config: Mapping[str, Any]) -> DualConfig:
        """Read a model's settings from ``config.json``."""
        ...

    def weights(self, config: DualConfig) -> NameMap:
        """Map all parameters to tensors."""
        ...

    def text_style(self, config: DualConfig, tokenizer_config: Mapping[str, Any]) -> TextStyle:
        """Return how texts become sequences, by the content of ``tokenizer_config.json``."""
        ...


ChooseFamily = Callable[[Mapping[str, Any], str], Any]
"""(content of a ``config.json``, its folder) -> its family."""
FAMILIES: dict[str, Any] = {
    "llava": llava,
    "llava_next": llava_next,
    "llava_next_video": llava_next,
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
"""``model_type`` of a ``config.json`` -> the family of a model that generates text."""
ENCODERS: dict[str, Any] = {
    "clip": dual_encoders,
    "siglip": dual_encoders,
    "siglip2": dual_encoders,
    "clip_text_model": dual_encoders,
    "siglip_text_model": dual_encoders,
    "siglip2_text_model": dual_encoders,
    "bert": bert,
}
"""``model_type`` of a ``config.json`` -> the family of a model that only computes embeddings."""


def family(hf_config: Mapping[str, Any], where: str) -> Family:
    """Return the family of a ``config.json``.

    Args:
        hf_config: the file's content.
        where: its folder, for error messages.

    Raises:
        ConfigError: no family has its ``model_type``, or an encoder's has.
    """
    kind = hf_config.get("model_type")
    if not isinstance(kind, str):
        raise ConfigError(f"{where}/config.json: model_type={kind!r} has to be a text")
    if kind in ENCODERS:
        raise ConfigError(
            f"{where}: model_type={kind!r} is an encoder: it computes embeddings (`jaxvlm embed`, "
            "`jaxvlm.load(folder).encode_text`), and generates no text"
        )
    if kind not in FAMILIES:
        raise ConfigError(
            f"{where}: model_type={kind!r} is not supported; known: {', '.join(FAMILIES)}; "
            "one of your own is named by config.model.family.target"
        )
    return FAMILIES[kind]


def family_of(own: Extension, path: str, built_in: ChooseFamily = family) -> ChooseFamily:
    """A function that gives the family of a ``config.json``: the user's own, or a built-in one.

    Args:
        own: names the user's own family; without a target, ``model_type`` chooses.
        path: what error messages call ``own``, for instance ``config.model.family``.
        built_in: chooses among those of jaxvlm: ``family``, or ``any_family``.

    Raises:
        ConfigError: the user's own can't be imported, or lacks a function of the protocol.
    """
    if not extension.is_set(own, path):
        return built_in
    made = extension.make(own, path, allow_module=True)
    members = ("config_from_hf", "weights", "chat_style", "span")
    if missing := [name for name in members if not callable(getattr(made, name, None))]:
        raise ConfigError(
            f"{path}.target={own.target!r} is no model family: it has no {', '.join(missing)}; see "
            "the protocol Family in jaxvlm/hf/families/__init__.py"
        )
    return lambda hf_config, where: made


def any_family(hf_config: Mapping[str, Any], where: str) -> Any:
    """Return the :class:`Family` or :class:`EncoderFamily` of a ``config.json``; as `family`."""
    kind = hf_config.get("model_type")
    return ENCODERS.get(kind if isinstance(kind, str) else "") or family(hf_config, where)
