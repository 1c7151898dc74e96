"""CLIP, SigLIP and SigLIP 2, both towers or the text tower: Hugging Face config and names."""

from __future__ import annotations

import dataclasses
import re
import string
from collections.abc import Mapping
from typing import Any

from jaxvlm.config import ConfigError, DualConfig
from jaxvlm.hf.families import clip, siglip, text_encoders
from jaxvlm.hf.families.config_reader import METADATA, ConfigFields, FeatureLayers, read
from jaxvlm.hf.families.name_map import Entry, NameMap
from jaxvlm.types import TextStyle

_GROUPS = {"vision_config": None, "text_config": None}
_IGNORED = METADATA | {"tie_word_embeddings"} | {"model_type"}
_FIELDS = {
    "clip": ConfigFields(
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
    "siglip": ConfigFields(_GROUPS, {}, _IGNORED),
    "siglip2": ConfigFields(_GROUPS, {}, _IGNORED),
}


def config_from_hf(hf_config: Mapping[str, Any]) -> DualConfig:
    """The model that a ``config.json`` of CLIP, SigLIP or SigLIP 2 describes, in float32.

    Args:
        hf_config: the file's content.

    Raises:
        ConfigError: an unknown field, or a value that this family does not support.
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
        vision = clip.vision_from_hf(groups["vision"], FeatureLayers(), at)
        vision = dataclasses.replace(vision, pool="class")
        return DualConfig(
            vision=vision,
            text=text,
            embed_dim=top["projection_dim"],
            scale=float(top["logit_scale_init_value"]),
        )
    groups["vision"].setdefault("model_type", f"{kind}_vision_model")
    vision = siglip.vision_from_hf(groups["vision"], FeatureLayers(), at)
    if vision.pool == "none":
        raise ConfigError(f"{at}vision_use_head=False: without the head images have no embedding")
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
    """Read the settings of a text tower's folder."""
    text, projected = text_encoders.text_from_hf(hf_config, where, "")
    is_clip = text.causal
    has_projection = not is_clip or _PROJECTED in (hf_config.get("architectures") or ())
    return DualConfig(
        towers=("text",),
        text=text,
        embed_dim=projected if has_projection else text.width,
        project=("text",) if has_projection else (),
        project_bias=not is_clip,
    )


_PROJECTED = "CLIPTextModelWithProjection"


def _groups(top: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return each tower's group; CLIP's old copies take precedence, as in transformers."""
    result = {}
    known = {"vision": clip.DEFAULTS, "text": text_encoders.defaults("clip_text_model")}
    for name, defaults in known.items():
        group, copy = top[f"{name}_config"] or {}, top.get(f"{name}_config_dict")
        result[name] = {**group} if copy is None else {**group, **defaults, **copy}
    return result


def weights(config: DualConfig) -> NameMap:
    """Map all parameters to tensors, under the names of transformers' models.

    Args:
        config: result of :func:`config_from_hf`.
    """
    is_clip = config.text.causal
    head = _CLIP_HEAD if is_clip else _SIGLIP_HEAD
    if config.towers == ("text",):
        # CLIP with its projection has the prefix of the two-tower model; the others have none.
        model = "text_model." if is_clip and config.project else ""
        renamed = [Entry(e.ours, e.theirs.removeprefix("text_model."), *e[2:]) for e in head]
        text_head = [e for e in renamed if config.project and e.ours.startswith("head/text")]
        sizes = {**text_encoders.dims(config.text), "E": config.embed_dim}
        aliases = () if model else ((r"^text_model\.", ""),)
        depths = {"text": config.text.depth}
        entries = (*text_encoders.entries(model), *text_head)
        return NameMap(entries, sizes, depths, aliases, _BUFFERS)
    tower = clip if is_clip else siglip
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
    """Return how texts become sequences.

    Args:
        config: settings of the model.
        tokenizer_config: content of ``tokenizer_config.json``; may be empty.

    Raises:
        ConfigError: padding that SigLIP was not trained with.
    """
    if config.text.causal:
        return TextStyle(config.text.max_length)
    # SigLIP was trained on texts with padding on the right, to which its tokens attend.
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
    """Canonicalize a text as SigLIP does: no punctuation, single spaces."""
    bare = text.translate(str.maketrans("", "", string.punctuation))
    return re.sub(r"\s+", " ", bare).strip()
