"""Connectors between the vision encoders of CLIP, SigLIP and InternVL and a decoder."""

from __future__ import annotations

import math

from jaxvlm.config import ConfigError, ConnectorConfig, VisionConfig
from jaxvlm.hf.families.name_map import Entry, linear_layer, norm_layer


def dims(vision: VisionConfig, connector: ConnectorConfig, width: int) -> dict[str, int]:
    """Return dim sizes: d of the encoder, m of its merged tokens, D and E of the decoder."""
    merged = vision.width * max(1, len(vision.feature_layers))
    if connector.pool == "concat":
        merged *= connector.merge**2
    return {"d": vision.width, "m": merged, "D": width, "E": width}


def mlp(activation: str, bias: bool = True, newline: bool = False) -> ConnectorConfig:
    """Return the settings of LLaVA's connector (arXiv 2310.03744): an MLP."""
    return ConnectorConfig(activation=activation, bias=bias, newline=newline)


def mlp_entries(model: str, connector: ConnectorConfig) -> tuple[Entry, ...]:
    """List LLaVA's and InternVL's entries; ``model`` is the prefix of ``multi_modal_projector``."""
    where = model + "multi_modal_projector."
    layers = (
        linear_layer("connector/{}_in", where + "linear_1", "m D", "D m"),
        linear_layer("connector/{}_out", where + "linear_2", "D E", "E D"),
    )
    entries = [entry for layer in layers for entry in layer[: 1 + connector.bias]]
    if connector.norm != "none":
        entries += norm_layer("connector/norm", where + "layer_norm", "m")
    if connector.newline:
        entries.append(Entry("connector/newline", model + "image_newline", "D", "D"))
    return tuple(entries)


def shuffled_mlp(ratio: float, activation: str) -> ConnectorConfig:
    """Return the settings of InternVL's connector (arXiv 2312.14238): pixel shuffle, norm, MLP.

    Raises:
        ConfigError: a ratio that is not one over a power of two.
    """
    merge = round(1 / ratio)
    if merge * ratio != 1 or merge & (merge - 1):
        raise ConfigError(f"config.json: downsample_ratio={ratio} is not 1 / 2^n")
    return ConnectorConfig(
        merge=merge, norm="layer", norm_merged=True, norm_eps=1e-5, activation=activation
    )


def linear() -> ConnectorConfig:
    """Return the settings of PaliGemma's connector (arXiv 2407.07726): a linear map."""
    return ConnectorConfig(kind="linear")


def linear_entries(model: str) -> tuple[Entry, ...]:
    """List the entries of :func:`linear`; ``model`` is the prefix of ``multi_modal_projector``."""
    return linear_layer("connector/{}_out", model + "multi_modal_projector.linear", "m D", "D m")


def shuffled_linear(scale_factor: int) -> ConnectorConfig:
    """Return the settings of Idefics3's and SmolVLM's (arXiv 2408.12637): pixel shuffle, linear."""
    return ConnectorConfig(kind="linear", merge=scale_factor, bias=False)


def shuffled_linear_entries(model: str) -> tuple[Entry, ...]:
    """List the entries of :func:`shuffled_linear`; ``model`` is the prefix of ``connector``."""
    theirs = model + "connector.modality_projection.proj.weight"
    return (Entry("connector/w_out", theirs, "m D", "D m"),)


def pooled_linear(vision: VisionConfig, tokens: int) -> ConnectorConfig:
    """Return the settings of Gemma 3's connector (arXiv 2503.19786): mean pooling, norm, linear.

    Args:
        vision: the vision encoder, whose ``norm_eps`` the connector shares.
        tokens: visual tokens per image, ``mm_tokens_per_image``.

    Raises:
        ConfigError: the tokens are no square, or its side does not divide that of the patches.
    """
    side, patches = math.isqrt(tokens), vision.image_size // vision.patch_size
    if side * side != tokens or patches % side:
        raise ConfigError(
            f"config.json: mm_tokens_per_image={tokens} is not a square whose side divides "
            f"{patches} x {patches} patches"
        )
    return ConnectorConfig(
        kind="linear",
        merge=patches // side,
        pool="mean" if side < patches else "concat",
        norm="rms_plus_one",
        norm_merged=True,
        norm_eps=vision.norm_eps,
        bias=False,
    )


def pooled_linear_entries(model: str) -> tuple[Entry, ...]:
    """List :func:`pooled_linear`'s entries; ``model`` prefixes ``multi_modal_projector``."""
    where = model + "multi_modal_projector."
    return (
        Entry("connector/norm/scale", where + "mm_soft_emb_norm.weight", "d", "d"),
        Entry("connector/w_out", where + "mm_input_projection_weight", "m D", "m D"),
    )
