"""Model FLOPs from shapes.

Convention, everywhere in jaxvlm: a multiply-add is 2 FLOPs; matmuls only (no softmax, norm or
embedding look-up); causal attention counts the half it needs; a trained part costs three
times its forward pass, a frozen part with something trained before it two times, a frozen
part with nothing trained before it once. A part with adapters counts as frozen with something
trained before it, and the adapters' own thin matmuls do not count. Recomputation is not counted:
this is MFU's numerator, not HFU's. Padding tokens are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np

from jaxvlm.config import ConfigError, DualConfig, ModelConfig, feature_blocks, layer_windows
from jaxvlm.models.lora import is_adapter
from jaxvlm.types import Batch


class Flops(NamedTuple):
    """FLOPs of one forward pass or one train step, by submodule."""

    vision: float
    """Of all images; if some blocks are frozen (``frozen_blocks``), of those blocks."""
    connector: float
    decoder: float
    head: float
    """The output projection."""
    vision_top: float = 0.0
    """The vision encoder's blocks after its frozen ones."""

    @property
    def total(self) -> float:
        """Sum over all parts."""
        return float(sum(self))


def forward(
    config: ModelConfig,
    tokens: float | int,
    length: float | int,
    images: float | int,
    patches: float | int = 0,
) -> Flops:
    """Count the FLOPs of a forward pass.

    Args:
        config: dims, ``decoder.vocab_size`` set.
        tokens: tokens in all packed sequences, without padding.
        length: keys per query before the causal half is taken (a sequence's mean segment length).
        images: images in all packed sequences; each frame of a video is one.
        patches: patches of an image, for models with packed images; 0: of the fixed image size.

    Raises:
        ConfigError: packed images without ``patches``.
    """
    if config.vision.packed and images and not patches:
        raise ConfigError("config.model.vision.packed=True: give the number of patches of an image")
    d = config.decoder
    patches = patches or (config.vision.image_size // config.vision.patch_size) ** 2
    depth, frozen_blocks = max(feature_blocks(config.vision)), config.vision.frozen_blocks
    bottom = _blocks(config, patches, 0, frozen_blocks or depth)
    vision = images * (bottom + _start(config, patches))
    top = images * _blocks(config, patches, frozen_blocks, depth) if frozen_blocks else 0.0
    connector = images * _connector(config, patches)
    heads = d.num_heads * d.head_dim
    weights = 2 * d.width * heads + 2 * d.width * d.num_kv_heads * d.head_dim
    mlp = 3 * d.width * d.mlp_dim
    if d.num_experts:
        mlp = d.experts_per_token * mlp + d.width * d.num_experts
    layers = 2.0 * d.depth * (weights + mlp)
    layers += sum(4 * (_within(window, length) / 2) * heads for window in layer_windows(d))
    head = tokens * 2 * d.width * d.vocab_size * d.head
    return Flops(vision, connector, tokens * layers, head, top)


def _within(window: int, length: float | int) -> float | int:
    """Mean keys per query, doubled for the causal half, with a sliding window of ``window``
    keys.
    """
    return length if not 0 < window < length else window * (2 - window / length)


def step(forward_flops: Flops, trained: dict[str, bool], adapted: Collection[str] = ()) -> Flops:
    """Count the FLOPs of a train step.

    Args:
        forward_flops: of its forward pass.
        trained: submodel -> whether any of its own parameters is trained; those left out are
            not. Keys are ``vision``, ``vision_top``, ``connector``, ``decoder``.
        adapted: submodels whose own parameters are frozen, but which have adapters.
    """
    before = False  # whether an earlier submodel is trained
    factors = {}
    for tower in ("vision", "vision_top", "connector", "decoder"):
        own = trained.get(tower, False)
        trains = own or tower in adapted
        factors[tower] = 3 if own else 2 if trains or before else 1
        before = before or trains
    factors["head"] = factors["decoder"]
    return Flops(**{part: factors[part] * n for part, n in forward_flops._asdict().items()})


def encoders(config: DualConfig, batch: Batch, trained: Collection[str]) -> Flops:
    """FLOPs of a step of a dual encoder on a batch; the text encoder's are in ``decoder``.

    A frozen encoder has no backward pass; the embeddings' projections are not counted.

    Args:
        config: dims.
        batch: texts, images, or both; numpy fields.
        trained: paths of the trained parameters.
    """
    full = {path.split("/")[0] for path in trained if "/lora_" not in path}
    adapted = {path.split("/")[0] for path in trained if "/lora_" in path}
    factor = {t: 3 if t in full else 2 if t in adapted else 1 for t in ("vision", "text")}
    length = (np.asarray(batch.segment) > 0).sum(axis=-1)
    squares = float((length.astype(np.float64) ** 2).sum())
    return towers(config, factor, *images(batch), float(length.sum()), squares)


def towers(
    config: DualConfig,
    factor: Mapping[str, int],
    images: float | int,
    patches: float | int,
    tokens: float | int,
    squares: float | int,
) -> Flops:
    """Count the FLOPs of a dual encoder's train step from counts of images and tokens.

    Args:
        config: dims.
        factor: submodel -> cost of its step in forward passes.
        images: number of images.
        patches: patches of an image; 0: of the fixed image size.
        tokens: tokens of all texts.
        squares: sum of the squares of the texts' lengths.
    """
    patches = patches or (config.vision.image_size // config.vision.patch_size) ** 2
    vision = images * (_start(config, patches) + _blocks(config, patches, 0, config.vision.depth))
    t = config.text
    weights = 2 * (4 * t.width**2 + 2 * t.width * t.mlp_dim)
    text = t.depth * (weights * tokens + 4 * t.width * squares / (2 if t.causal else 1))
    return Flops(
        vision=factor["vision"] * vision,
        vision_top=0.0,
        connector=0.0,
        decoder=factor["text"] * text,
        head=0.0,
    )


def _blocks(config: ModelConfig | DualConfig, patches: float | int, first: int, last: int) -> float:
    """FLOPs of the vision encoder's blocks ``first..last - 1`` for one image."""
    v = config.vision
    tokens = patches + v.class_token
    window_tokens = min(tokens, (v.window // v.patch_size) ** 2) if v.window else tokens
    run = range(first, last)
    keys = sum(tokens if i in v.full_layers else window_tokens for i in run)
    weights = 4 * v.width**2 + (3 if v.gated else 2) * v.width * v.mlp_dim
    return float(tokens * (2 * len(run) * weights + 4 * keys * v.width))


def _start(config: ModelConfig | DualConfig, patches: float | int) -> float:
    """FLOPs of one image before the vision encoder's first block."""
    v = config.vision
    table = 2.0 * patches * (v.image_size // v.patch_size) ** 2 * v.width
    resized = table if v.packed and v.position == "learned" else 0.0
    return resized + _stem(config, patches)


def _connector(config: ModelConfig, patches: float | int) -> float:
    """FLOPs of the connector for one image."""
    v, c, D = config.vision, config.connector, config.decoder.width
    tokens = patches / c.merge**2 + v.keep_class_token
    if c.video_pool:
        tokens += patches / c.video_pool**2
    width = v.width * max(1, len(v.feature_layers)) / (1 + c.deepstack_levels)
    merged = width * (c.merge**2 if c.pool == "concat" else 1)
    hidden = c.hidden or D
    token = merged * hidden + hidden * D if c.kind == "mlp" else merged * D
    scored = 0.0
    if c.relevance.budget:  # every patch gets a score
        tokens = c.relevance.budget
        scored = 2.0 * patches * c.relevance.width * (width * (1 + c.relevance.query) + 14)
    return 2.0 * (1 + c.deepstack_levels) * tokens * token + scored


def _stem(config: ModelConfig | DualConfig, patches: float | int) -> float:
    """FLOPs of the stem for one image."""
    v = config.vision
    if v.stem == "linear":
        return 2.0 * 3 * v.frames * v.patch_size**2 * patches * v.width
    steps = int(math.log2(v.patch_size))
    channels = [3] + [max(8, v.width >> max(0, 2 - i)) for i in range(steps - 1)] + [v.width]
    sides = [v.image_size >> (i + 1) for i in range(steps)]
    return 2.0 * 9 * sum(a * b * s * s for a, b, s in zip(channels, channels[1:], sides))


def images(batch: Batch) -> tuple[float, float]:
    """Count a batch's images and patches per image, for :func:`forward`.

    Images of different sizes are counted as a number of images of one size with the same patches
    and the same pairs of patches in total, so that the FLOPs of both weights and attention are
    right.

    Args:
        batch: numpy fields.

    Returns:
        Patches are 0 if all images have the fixed size.
    """
    if batch.grid is None:
        present = 0 if batch.image_start is None else (np.asarray(batch.image_start) >= 0).sum()
        return float(present), 0.0
    t, h, w = np.asarray(batch.grid, np.float64).reshape(-1, 3).T
    patches, pairs = float((t * h * w).sum()), float((t * (h * w) ** 2).sum())
    return (patches**2 / pairs, pairs / patches) if pairs else (0.0, 0.0)


def reach(batch: Batch, rows: int = 4) -> float:
    """Twice the mean number of keys that a token attends to, padding excluded.

    Twice, because :func:`forward` takes the causal half of it.

    Args:
        batch: numpy fields.
        rows: number of packed sequences to look at.
    """
    segment = np.asarray(batch.segment[:rows])
    attended = segment[:, :, None] == segment[:, None, :]
    if batch.parent is not None:
        parent = np.asarray(batch.parent[:rows])
        attended |= (parent[:, :, None] == segment[:, None, :]) & (parent > 0)[:, :, None]
    attended &= np.tri(segment.shape[1], dtype=bool)
    real = segment > 0
    return 2.0 * float(attended.sum(-1)[real].mean()) if real.any() else 0.0


def of_batch(
    config: ModelConfig, trained: Collection[str], batch: Batch, scale: float = 1.0
) -> tuple[Flops, Flops]:
    """Count FLOPs of a forward pass, and of a step.

    Args:
        config: the model's settings.
        trained: paths of the trained parameters.
        batch: a representative batch, numpy.
        scale: sequences of a step over sequences of ``batch``.
    """
    num_tokens = scale * float((batch.segment > 0).sum())
    num_images, patches = images(batch)
    adapters = {path for path in trained if is_adapter(path)} if config.lora.rank else set()
    owns = {path.split("/")[0] for path in trained if path not in adapters}
    adapted = {path.split("/")[0] for path in adapters}
    once = forward(config, num_tokens, reach(batch), scale * num_images, patches)
    return once, step(once, dict.fromkeys(owns, True), adapted)
