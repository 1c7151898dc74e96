"""The connectors between CLIP's, SigLIP's and InternVL's towers and a decoder."""

from __future__ import annotations

import math

from jaxvlm.config import ConfigError, ConnectorConfig, VisionConfig
from jaxvlm.models.families.names import Entry


def dims(vision: VisionConfig, connector: ConnectorConfig, width: int) -> dict[str, int]:
    """Letter -> size: d the tower's width, m after merge and taps, D and E the decoder's."""
    merged = vision.width * max(1, len(vision.feature_layers))
    if connector.pool == "concat":
        merged *= connector.merge**2
    return {"d": vision.width, "m": merged, "D": width, "E": width}


def mlp(activation: str, bias: bool = True, newline: bool = False) -> ConnectorConfig:
    """LLaVA's (arXiv 2310.03744)."""
    return ConnectorConfig(activation=activation, bias=bias, newline=newline)


def mlp_entries(model: str, connector: ConnectorConfig) -> tuple[Entry, ...]:
    """Of LLaVA's and InternVL's connectors; ``model`` stands before ``multi_modal_projector``."""
    where = model + "multi_modal_projector."
    bias = (
        Entry("connector/b_in", where + "linear_1.bias", "D", "D"),
        Entry("connector/b_out", where + "linear_2.bias", "D", "D"),
    )
    norm = (
        Entry("connector/norm/scale", where + "layer_norm.weight", "m", "m"),
        Entry("connector/norm/bias", where + "layer_norm.bias", "m", "m"),
    )
    return (
        Entry("connector/w_in", where + "linear_1.weight", "m D", "D m"),
        Entry("connector/w_out", where + "linear_2.weight", "D E", "E D"),
        *(bias if connector.bias else ()),
        *(norm if connector.norm != "none" else ()),
        *(
            (Entry("connector/newline", model + "image_newline", "D", "D"),)
            if connector.newline
            else ()
        ),
    )


def shuffled_mlp(ratio: float, activation: str) -> ConnectorConfig:
    """InternVL's (arXiv 2312.14238): pixel shuffle by ``downsample_ratio``, norm, MLP.

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
    """PaliGemma's (arXiv 2407.07726)."""
    return ConnectorConfig(kind="linear")


def linear_entries(model: str) -> tuple[Entry, ...]:
    """Of :func:`linear`; ``model`` stands before ``multi_modal_projector``."""
    where = model + "multi_modal_projector.linear."
    return (
        Entry("connector/w_out", where + "weight", "m D", "D m"),
        Entry("connector/b_out", where + "bias", "D", "D"),
    )


def shuffled_linear(scale_factor: int) -> ConnectorConfig:
    """Idefics3's and SmolVLM's (arXiv 2408.12637): pixel shuffle and one matrix."""
    return ConnectorConfig(kind="linear", merge=scale_factor, bias=False)


def shuffled_linear_entries(model: str) -> tuple[Entry, ...]:
    """Of :func:`shuffled_linear`; ``model`` stands before ``connector``."""
    theirs = model + "connector.modality_projection.proj.weight"
    return (Entry("connector/w_out", theirs, "m D", "D m"),)


def pooled_linear(vision: VisionConfig, tokens: int) -> ConnectorConfig:
    """Gemma 3's (arXiv 2503.19786): mean over squares, norm, one matrix.

    Args:
        vision: the tower, whose norms' eps it shares.
        tokens: of a picture, ``mm_tokens_per_image``.

    Raises:
        ConfigError: tokens that are no square, or whose side does not divide the patches'.
    """
    side, patches = math.isqrt(tokens), vision.image_size // vision.patch_size
    if side * side != tokens or patches % side:
        raise ConfigError(
            f"config.json: mm_tokens_per_image={tokens} does not part {patches} x {patches} patches"
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
    """Of :func:`pooled_linear`; ``model`` stands before ``multi_modal_projector``."""
    where = model + "multi_modal_projector."
    return (
        Entry("connector/norm/scale", where + "mm_soft_emb_norm.weight", "d", "d"),
        Entry("connector/w_out", where + "mm_input_projection_weight", "m D", "m D"),
    )
