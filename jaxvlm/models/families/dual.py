"""CLIP, SigLIP and SigLIP 2 in Hugging Face's words: both towers, or the text tower alone."""

from __future__ import annotations

import dataclasses
import re
import string
from collections.abc import Mapping
from typing import Any

from jaxvlm.config import ConfigError, DualConfig
from jaxvlm.models.families import clip, siglip, text_encoders
from jaxvlm.models.families.fields import METADATA, Features, Fields, read
from jaxvlm.models.families.names import Entry, NameMap
from jaxvlm.types import TextStyle

_GROUPS = {"vision_config": None, "text_config": None}
_IGNORED = METADATA | {"tie_word_embeddings"} | {"model_type"}
_FIELDS = {
    "clip": Fields(
        {
            **_GROUPS,
            "projection_dim": 512,
            "logit_scale_init_value": 2.6592,
            "text_config_dict": None,
            "vision_config_dict": None,
        },
        {},
        _IGNORED,
    ),
    "siglip": Fields(_GROUPS, {}, _IGNORED),
    "siglip2": Fields(_GROUPS, {}, _IGNORED),
}


def config_from_hf(hf_config: Mapping[str, Any]) -> DualConfig:
    """The model that a ``config.json`` of CLIP, SigLIP or SigLIP 2 describes, in float32.

    Args:
        hf_config: the file's content.

    Raises:
        ConfigError: a field that is unknown here, or a value that this family can't do.
    """
    where = "config.json: "
    kind = hf_config["model_type"]
    if kind not in _FIELDS:
        return _text_alone(hf_config, where)
    top = read(hf_config, _FIELDS[kind], where)
    groups = _groups(top)
    text, projected = text_encoders.text_from_hf(
        groups["text"], where + "text_config.", f"{kind}_text_model"
    )
    at = where + "vision_config."
    if kind == "clip":
        vision = clip.vision_from_hf(groups["vision"], Features(), at)
        vision = dataclasses.replace(vision, pool="class")
        return DualConfig(
            vision=vision,
            text=text,
            embed_dim=top["projection_dim"],
            scale=float(top["logit_scale_init_value"]),
        )
    groups["vision"].setdefault("model_type", f"{kind}_vision_model")
    vision = siglip.vision_from_hf(groups["vision"], Features(), at)
    if vision.pool == "none":
        raise ConfigError(f"{at}vision_use_head=False: the pictures have no vector without it")
    if projected != vision.width:
        raise ConfigError(
            f"{where}text_config.projection_size={projected} is not the vision tower's "
            f"hidden_size={vision.width}"
        )
    return DualConfig(
        vision=vision,
        text=text,
        embed_dim=projected,
        project=("text",),
        project_bias=True,
        scale=0.0,
        has_bias=True,
    )


def _text_alone(hf_config: Mapping[str, Any], where: str) -> DualConfig:
    """The text tower of a folder that holds nothing else."""
    text, projected = text_encoders.text_from_hf(hf_config, where, "")
    clips = text.causal
    has = not clips or _PROJECTED in (hf_config.get("architectures") or ())
    return DualConfig(
        towers=("text",),
        text=text,
        embed_dim=projected if has else text.width,
        project=("text",) if has else (),
        project_bias=not clips,
    )


_PROJECTED = "CLIPTextModelWithProjection"


def _groups(top: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Tower -> its group, where CLIP's old copy of it has the last word, as in transformers."""
    found = {}
    known = {"vision": clip.DEFAULTS, "text": text_encoders.defaults("clip_text_model")}
    for name, defaults in known.items():
        group, copy = top[f"{name}_config"] or {}, top.get(f"{name}_config_dict")
        found[name] = {**group} if copy is None else {**group, **defaults, **copy}
    return found


def weights(config: DualConfig) -> NameMap:
    """Every tensor, in transformers' names.

    Args:
        config: of :func:`config_from_hf`.
    """
    clips = config.text.causal
    head = _CLIP_HEAD if clips else _SIGLIP_HEAD
    if config.towers == ("text",):
        # CLIP with its projection keeps the prefix of the whole model; the others have none.
        model = "text_model." if clips and config.project else ""
        own = [Entry(e.ours, e.theirs.removeprefix("text_model."), *e[2:]) for e in head]
        found = [e for e in own if config.project and e.ours.startswith("head/text")]
        sizes = {**text_encoders.dims(config.text), "E": config.embed_dim}
        aliases = () if model else ((r"^text_model\.", ""),)
        depths = {"text": config.text.depth}
        return NameMap((*text_encoders.entries(model), *found), sizes, depths, aliases, _BUFFERS)
    tower = clip if clips else siglip
    sizes = {**clip.dims(config.vision), **text_encoders.dims(config.text), "E": config.embed_dim}
    depths = {"vision": config.vision.depth, "text": config.text.depth}
    entries = (
        *tower.entries("vision_model.", config.vision),
        *text_encoders.entries("text_model."),
        *head,
    )
    return NameMap(entries, sizes, depths, (), _BUFFERS)


_BUFFERS = ("embeddings.position_ids",)
_CLIP_HEAD = (
    Entry("head/vision", "visual_projection.weight", "d E", "E d"),
    Entry("head/text", "text_projection.weight", "D E", "E D"),
    Entry("head/scale", "logit_scale", "", ""),
)
_SIGLIP_HEAD = (
    Entry("head/text", "text_model.head.weight", "D E", "E D"),
    Entry("head/text_bias", "text_model.head.bias", "E", "E"),
    Entry("head/scale", "logit_scale", "", "1"),
    Entry("head/bias", "logit_bias", "", "1"),
)


def text_style(config: DualConfig, tokenizer_config: Mapping[str, Any]) -> TextStyle:
    """How texts become rows.

    Args:
        config: of the model.
        tokenizer_config: the content of ``tokenizer_config.json``, perhaps empty.

    Raises:
        ConfigError: padding that SigLIP was not trained with.
    """
    if config.text.causal:
        return TextStyle(config.text.max_length)
    # SigLIP was trained on texts filled up on the right with padding that its tokens see.
    if (side := tokenizer_config.get("padding_side", "right")) != "right":
        raise ConfigError(
            f"tokenizer_config.json: padding_side={side!r} is not supported, only 'right'"
        )
    name = tokenizer_config.get("tokenizer_class", "")
    plain = name.startswith("Siglip") and not name.startswith("Siglip2")
    clean = canonical if plain else str  # SigLIP 2 has Gemma's tokenizer
    if tokenizer_config.get("do_lower_case", True):
        return TextStyle(config.text.max_length, True, lambda text: clean(text.lower()))
    return TextStyle(config.text.max_length, True, clean)


def canonical(text: str) -> str:
    """SigLIP's texts: no punctuation, single spaces."""
    bare = text.translate(str.maketrans("", "", string.punctuation))
    return re.sub(r"\s+", " ", bare).strip()
