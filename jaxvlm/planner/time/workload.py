"""Work of one device in a train step: matmuls and memory traffic.

Matmuls are listed one by one with their FLOPs and the bytes that they read and write; norms,
activations, residuals and softmaxes count as one pass each over what they read and write,
since compilers fuse them. Nothing is traced: a step is listed in less than a millisecond.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxvlm.config import DualConfig, ModelConfig, feature_blocks, layer_windows
from jaxvlm.parallel.mesh import BATCH_AXES
from jaxvlm.planner.memory.step_memory import StepSetup
from jaxvlm.planner.request import held_dtypes, trainable_params
from jaxvlm.planner.request.per_object import per_object
from jaxvlm.planner.request.trainable_params import TrainableParams

Number = float | int
Network = ModelConfig | DualConfig
TOWERS = ("vision", "vision_top", "connector", "decoder")


class WorkItem(NamedTuple):
    """Work of one device, with all its repetitions in a step."""

    part: str
    """vision | vision_top | connector | decoder | head | update."""
    kind: str
    """forward | input | weight: matmuls with weights, and their gradients; keys | values | back:
    attention's matmuls; softmax | activation | move: no matmul.
    """
    flops: float
    bytes: float
    """Bytes read and written."""
    size: float = 0.0
    """Of matmuls the smaller side of the weights, or a head's dim; else an array's bytes."""
    numbers: float = 0.0
    """Numbers that a softmax or an activation is applied to."""


_MOVES = {"gpu": 5.0, "tpu": 2.0, "cpu": 2.0}
"""Stacked by the scan over layers: written and read; on GPUs filled with zeros, and copied. From
compiled steps of CLIP-B/32 for H200 and v5p; on an H200 a step without remat took what this says.
"""


class ForwardBackward(NamedTuple):
    """Forward and backward passes through a tower in a step."""

    backward: bool
    """Whether it has a backward pass."""
    trained: float
    """Fraction of its blocks' weights whose gradients are computed, 0..1, without experts."""
    experts: float
    """The same fraction of its experts' weights."""
    other: float
    """The same fraction of its weights outside of blocks."""
    remat: str
    moves: float = 0.0
    """How often a byte is moved that ``remat="none"`` saves and ``remat="dots"`` does not."""

    @property
    def recomputes(self) -> bool:
        """Whether its matmuls are recomputed for the backward pass."""
        return self.backward and self.remat in ("full", "offload")

    @property
    def recomputes_elementwise(self) -> bool:
        """Whether all but matmuls and attention is recomputed for the backward pass."""
        return self.backward and self.remat != "none"

    def recomputes_attention(self, fused: bool) -> bool:
        """Whether attention is recomputed: ``remat="dots"`` saves what a kernel gives."""
        return self.recomputes or (self.recomputes_elementwise and not fused)


class Block(NamedTuple):
    """A transformer block."""

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    gated: bool
    experts: int = 0
    chosen: int = 1

    def kv_width(self, tensor: int) -> float:
        """Width of keys on a device: heads that ``tensor`` does not divide are replicated."""
        return self.kv_heads * self.head_dim / (1 if self.kv_heads % tensor else tensor)


class Weights(NamedTuple):
    """Parameters of a tower, without embeddings."""

    blocks: float
    """Of its blocks, without experts."""
    experts: float
    other: float
    """Of all other layers: stems, tables, output matrices."""
    layers: int

    @property
    def total(self) -> float:
        """All parameters."""
        return self.blocks + self.experts + self.other


@per_object
def blocks(config: Network) -> dict[str, Block]:
    """Tower -> dims of its blocks, for the towers of the model."""
    v = config.vision
    vision = Block(v.width, v.num_heads, v.num_heads, v.width // v.num_heads, v.mlp_dim, v.gated)
    if isinstance(config, DualConfig):
        t = config.text
        text = Block(t.width, t.num_heads, t.num_heads, t.width // t.num_heads, t.mlp_dim, False)
        return {name: {"vision": vision, "text": text}[name] for name in config.towers}
    d = config.decoder
    decoder = Block(
        d.width, d.num_heads, d.num_kv_heads, d.head_dim, d.mlp_dim, True, d.num_experts,
        d.experts_per_token or 1,
    )  # fmt: skip
    return {"vision": vision, "vision_top": vision, "decoder": decoder}


@per_object
def layers(config: Network) -> dict[str, int]:
    """Tower -> number of blocks that run."""
    if isinstance(config, DualConfig):
        return {"vision": config.vision.depth, "text": config.text.depth}
    depth, frozen_blocks = max(feature_blocks(config.vision)), config.vision.frozen_blocks
    return {
        "vision": frozen_blocks or depth,
        "vision_top": max(0, depth - frozen_blocks) if frozen_blocks else 0,
        "decoder": config.decoder.depth,
    }


@per_object
def weights(config: Network) -> dict[str, Weights]:
    """Tower -> its parameters, from the config alone."""
    v = config.vision
    depth, frozen_blocks = v.depth, v.frozen_blocks
    above = depth - frozen_blocks if frozen_blocks else 0
    own = {"vision": frozen_blocks or depth, "vision_top": above}
    own |= {"decoder": config.decoder.depth} if isinstance(config, ModelConfig) else {}
    own |= {"text": config.text.depth} if isinstance(config, DualConfig) else {}
    result, other = {}, _other_weights(config)
    for tower, b in blocks(config).items():
        attention = 2 * b.width * b.head_dim * (b.heads + b.kv_heads)
        mlp = (3 if b.gated else 2) * b.width * b.mlp
        dense = attention + (b.width * b.experts if b.experts else mlp)
        n, experts = own[tower], b.experts * mlp
        result[tower] = Weights(float(n * dense), float(n * experts), float(other.get(tower, 0)), n)
    if "connector" in other:
        result["connector"] = Weights(0.0, 0.0, float(other["connector"]), 0)
    return result


def _other_weights(config: Network) -> dict[str, Number]:
    """Tower -> parameters outside of its blocks."""
    v = config.vision
    patch = 3 * v.frames * v.patch_size**2 * v.width
    table = (v.image_size // v.patch_size) ** 2 * v.width if v.position == "learned" else 0
    sizes: dict[str, Number] = {"vision": patch + table}
    if isinstance(config, DualConfig):
        t, E = config.text, config.embed_dim
        pool = 4 * v.width**2 + 2 * v.width * v.mlp_dim if v.pool == "attention" else 0
        sizes["vision"] += pool + v.width * E * ("vision" in config.project)
        tables = (t.vocab_size + t.max_length + t.num_types) * t.width
        sizes["text"] = tables + t.pooler * t.width**2 + t.width * E * ("text" in config.project)
        return sizes
    c, d = config.connector, config.decoder
    merged, hidden = _connector_dims(config)
    one = merged * hidden + hidden * d.width if c.kind == "mlp" else merged * d.width
    sizes["connector"] = (1 + c.deepstack_levels) * one
    sizes["decoder"] = (1 if d.tied_embeddings or not d.head else 2) * d.vocab_size * d.width
    return sizes


def passes(setup: StepSetup) -> dict[str, ForwardBackward]:
    """Tower -> its passes in a step; a tower before all trained parameters has no backward pass."""
    return _passes(setup.config, setup.frozen, setup.platform)


@per_object
def _passes(config: Network, frozen: tuple[str, ...], platform: str) -> dict[str, ForwardBackward]:
    trained_before, result = False, {}
    dual, trained = isinstance(config, DualConfig), trainable(config, frozen)
    for tower in ("vision", "text") if dual else TOWERS:
        own = trained.get(tower, trainable_params.NOTHING)
        of_tower = None if tower == "connector" else tower.removesuffix("_top")
        remat = getattr(config, of_tower).remat if of_tower else "none"
        shares, moves = (own.blocks, own.experts, own.other), _MOVES[platform] * (remat == "none")
        result[tower] = ForwardBackward(own.backward or trained_before, *shares, remat, moves)
        trained_before = not dual and (trained_before or own.backward)
    return result


def trainable_of(setup: StepSetup) -> Mapping[str, TrainableParams]:
    """Tower -> its trainable parameters."""
    return trainable(setup.config, setup.frozen)


def trainable(config: Network, frozen: tuple[str, ...]) -> Mapping[str, TrainableParams]:
    """Tower -> its trainable parameters; ``frozen`` are path patterns."""
    return {} if frozen == ("*",) else trainable_params.of(config, frozen)


def stored_bytes(setup: StepSetup) -> Mapping[str, float]:
    """Tower -> mean bytes of a parameter between steps."""
    embeddings = setup.pairs.embeddings if setup.pairs else None
    return held_dtypes.stored_bytes(setup.config, embeddings, setup.held)


def work_items(setup: StepSetup, width: int, fused: bool) -> list[WorkItem]:
    """Work of a device in a step, without the optimizer's update.

    Args:
        setup: the train step.
        width: bytes of a number in the compute dtype.
        fused: attention stores no scores, and skips what a causal mask hides.
    """
    mesh = setup.mesh
    inner = (mesh.tensor, mesh.context, mesh.expert, mesh.pipeline, setup.strategy.context)
    batch = (_shard_rows(setup), setup.length, setup.images, setup.patches, setup.microbatches)
    key = (*inner, *batch, setup.frozen, setup.platform)
    return _items(setup.config, _Same(setup, key), width, fused)


class _Same:
    """A setup, equal to those with the same work on a device: under other strategies, and on
    meshes that divide the batch by the same number.
    """

    def __init__(self, setup: StepSetup, key: tuple[Any, ...]):
        self.setup, self.key = setup, key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@per_object
def _items(config: Network, same: _Same, width: int, fused: bool) -> list[WorkItem]:
    del config  # that of ``same.setup``
    return list(_ops(same.setup, width, fused))


def _shard_rows(setup: StepSetup) -> float:
    """Sequences of a device, all microbatches together."""
    return setup.rows / math.prod(getattr(setup.mesh, axis) for axis in (*BATCH_AXES, "context"))


def _ops(setup: StepSetup, c: int, fused: bool) -> Iterator[WorkItem]:
    config: Network = setup.config
    rows = _shard_rows(setup) / setup.microbatches
    if setup.images and "vision" in blocks(config):
        yield from _images(setup, rows, c, fused)
    if not isinstance(config, DualConfig):
        yield from _decoder(setup, rows, c, fused)
    elif "text" in config.towers and setup.length:
        yield from _texts(setup, config, rows, c, fused)


def similarity(pairs: Number, width: Number, products: Number = 1) -> list[WorkItem]:
    """Work of the similarity matrix, in tiles that the backward pass recomputes.

    Args:
        pairs: pairs of a device's queries with all documents.
        width: dims of an embedding.
        products: dot products of embeddings per pair.
    """
    each = pairs * products
    return [
        WorkItem("loss", "forward", 8.0 * each * width, 0.0, width),
        WorkItem("loss", "softmax", 0.0, 16.0 * each, 4.0 * each, 2.0 * each),
    ]


def _images(setup: StepSetup, rows: Number, c: int, fused: bool) -> Iterator[WorkItem]:
    """Work of the vision tower and the connector."""
    config, mesh, times = setup.config, setup.mesh, setup.microbatches
    v, by_tower, run = config.vision, passes(setup), layers(config)
    patches, a_row = image_patches(setup)
    keys = patches + v.class_token if fused else a_row  # a kernel skips the row's other images
    images = rows * setup.images / mesh.pipeline
    tokens = images * (patches + v.class_token)
    k = 3 * v.frames * v.patch_size**2
    stem = _outside(by_tower["vision"])
    yield from _matmul("vision", times, images * patches, k, v.width, stem, c)
    window_keys = min(keys, (v.window // v.patch_size) ** 2) if v.window and fused else keys
    for tower, b in blocks(config).items():
        if tower in ("vision", "vision_top") and run[tower]:
            n, fwd_bwd = run[tower], by_tower[tower]
            windowed = sum(i not in v.full_layers for i in range(n)) if v.window else 0
            keys_per_block = [keys] * (n - windowed) + [window_keys] * windowed
            rest = (False, fwd_bwd, c, mesh.tensor, fused)
            yield from _stack(tower, b, times, tokens, keys_per_block, *rest)
    if isinstance(config, ModelConfig):
        fwd_bwd = _outside(by_tower["connector"])
        yield from _connector(config, times, images, patches, fwd_bwd, c, mesh.tensor)


def _texts(
    setup: StepSetup, config: DualConfig, rows: Number, c: int, fused: bool
) -> Iterator[WorkItem]:
    """Work of the text tower."""
    mesh, times = setup.mesh, setup.microbatches
    t, fwd_bwd = config.text, passes(setup)["text"]
    keys_per_block, tokens = [setup.length] * t.depth, rows * setup.length
    b = blocks(config)["text"]
    rest = (t.causal, fwd_bwd, c, mesh.tensor, fused)
    yield from _stack("text", b, times, tokens, keys_per_block, *rest)
    table = t.vocab_size * t.width * fwd_bwd.other  # its gradient is written in full
    moved = times * tokens * t.width * c * (5 if fwd_bwd.backward else 2) + 8 * table
    yield WorkItem("text", "move", 0.0, moved, tokens * t.width * c)


def _decoder(setup: StepSetup, rows: Number, c: int, fused: bool) -> Iterator[WorkItem]:
    """Work of the decoder's blocks, embeddings and head."""
    assert isinstance(setup.config, ModelConfig)
    mesh, times, d = setup.mesh, setup.microbatches, setup.config.decoder
    tokens, fwd_bwd = rows * setup.length, passes(setup)["decoder"]
    # With context parallelism, attention is full and by plain matmuls, except with Ulysses.
    fused = fused and (mesh.context == 1 or setup.strategy.context == "ulysses")
    keys_per_block = [float(min(w or setup.length, setup.length)) for w in layer_windows(d)]
    keys_per_block = keys_per_block if fused else [float(setup.length)] * d.depth
    own_keys = keys_per_block[: max(1, d.depth // mesh.pipeline)]
    b, rest = _on_platform(setup, blocks(setup.config)["decoder"]), (fwd_bwd, c, mesh.tensor)
    yield from _stack("decoder", b, times, tokens, own_keys, True, *rest, fused, mesh.expert)
    size = tokens * d.width * c
    yield WorkItem("decoder", "move", 0.0, times * size * (5 if fwd_bwd.backward else 2), size)
    if d.head:
        yield from _head(setup, times, tokens, fwd_bwd, c)


def _on_platform(setup: StepSetup, b: Block) -> Block:
    """The block as the platform runs it: on CPU every expert processes every token."""
    if setup.platform != "cpu" or not b.experts:
        return b
    return b._replace(chosen=b.chosen * b.experts)


def _outside(fwd_bwd: ForwardBackward) -> ForwardBackward:
    """Passes of the tower's matmuls outside of its blocks."""
    return fwd_bwd._replace(trained=fwd_bwd.other)


def image_patches(setup: StepSetup) -> tuple[Number, Number]:
    """(mean patches of an image, patches that one attends to where no mask is used).

    Of images of unlike sizes the mean is a lower bound of what a patch attends to on the average.
    """
    v = setup.config.vision
    if v.packed:
        return setup.patches / max(1, setup.images), float(setup.patches)
    patches = float((v.image_size // v.patch_size) ** 2)
    return patches, patches + v.class_token


def _matmul(
    part: str, times: Number, rows: Number, k: Number, n: Number, fwd_bwd: ForwardBackward, c: int,
    recomputed: bool = True, extra: Number = 0.0,
) -> Iterator[WorkItem]:  # fmt: skip
    """``rows x k`` by weights ``k x n``, with its gradients; ``extra`` bytes of other weights."""
    flops, side = 2 * rows * k * n * times, min(k, n)
    sent = times * (c * (rows * k + k * n + rows * n) + extra)
    forward = 1 + (recomputed and fwd_bwd.recomputes)
    yield WorkItem(part, "forward", forward * flops, forward * sent, side)
    if fwd_bwd.backward:
        yield WorkItem(part, "input", flops, sent, side)
    if fwd_bwd.trained:  # weight gradients are float32
        written = 4 * k * n + 4 / c * extra
        sent = times * (c * rows * (k + n) + written)
        yield WorkItem(part, "weight", fwd_bwd.trained * flops, fwd_bwd.trained * sent, side)


def _stack(
    part: str, b: Block, times: Number, tokens: Number, keys_per_block: Sequence[Number],
    causal: bool,
    fwd_bwd: ForwardBackward, c: int, tensor: int, fused: bool, shards: int = 1,
) -> Iterator[WorkItem]:  # fmt: skip
    """Work of a stack of blocks, with the number of keys per query in each."""
    n, D, F = len(keys_per_block), b.width, b.mlp / tensor
    q, kv = b.heads * b.head_dim / tensor, b.kv_width(tensor)
    for out in (q, kv, kv):
        yield from _matmul(part, n * times, tokens, D, out, fwd_bwd, c)
    yield from _matmul(part, n * times, tokens, q, D, fwd_bwd, c)
    if b.experts:
        yield from _matmul(part, n * times, tokens, D, b.experts, fwd_bwd, c)
        yield from _experts(part, b, n * times, tokens, fwd_bwd, c, tensor, shards)
    else:
        for _ in range(2 if b.gated else 1):
            yield from _matmul(part, n * times, tokens, D, F, fwd_bwd, c)
        yield from _matmul(part, n * times, tokens, F, D, fwd_bwd, c, recomputed=False)
    sizes = (q, kv, b.heads / tensor)
    yield from _scores(part, times, tokens, keys_per_block, causal, *sizes, fwd_bwd, c, fused)
    wide = F * (b.chosen if b.experts else 1)
    rounds = n * times * (1 + fwd_bwd.recomputes_elementwise + 2 * fwd_bwd.backward)
    moved = rounds * (9 * D + 2 * (q + kv))
    if fwd_bwd.backward:
        per_mlp = F * (b.chosen if b.experts else 1) * (1 + b.gated)
        more = 5 * D + q * (2 - fused) + 4 * kv + 2 * per_mlp
        moved += fwd_bwd.moves * n * times * more
    yield WorkItem(part, "move", 0.0, tokens * c * moved, c * tokens * D)
    passes_forward = 1 + fwd_bwd.recomputes_elementwise
    numbers = n * times * (passes_forward + fwd_bwd.backward) * tokens * wide
    moved = rounds * tokens * c * (3 if b.gated else 2) * wide
    yield WorkItem(part, "activation", 0.0, moved, c * tokens * wide, numbers)


def _experts(
    part: str,
    b: Block,
    times: Number,
    tokens: Number,
    fwd_bwd: ForwardBackward,
    c: int,
    tensor: int,
    shards: int,
) -> Iterator[WorkItem]:
    """Grouped matmuls: each token's copies, and the weights of all experts on this device."""
    rows, F, own = tokens * b.chosen, b.mlp / tensor, b.experts / shards
    fwd_bwd = fwd_bwd._replace(trained=fwd_bwd.experts)
    for k, n, recomputed in ((b.width, F, True), (b.width, F, True), (F, b.width, False)):
        yield from _matmul(part, times, rows, k, n, fwd_bwd, c, recomputed, (own - 1) * k * n * c)
    moved = rows * b.width * c
    yield WorkItem(part, "move", 0.0, times * (2 + 2 * fwd_bwd.backward) * moved, moved)


def _scores(
    part: str, times: Number, tokens: Number, keys_per_block: Sequence[Number], causal: bool,
    q: Number,
    kv: Number, heads: Number, fwd_bwd: ForwardBackward, c: int, fused: bool,
) -> Iterator[WorkItem]:  # fmt: skip
    """Attention's two matmuls and the softmax between."""
    keys = times * sum(keys_per_block) * (0.5 if causal and fused else 1.0)
    once, dim = 2 * tokens * keys * q, q / heads
    forward, back = 1 + fwd_bwd.recomputes_attention(fused), fwd_bwd.backward
    io = times * len(keys_per_block) * tokens * c * (q + kv)
    # Scores that are not stored are recomputed in the backward pass.
    of_keys = once * (forward + back * (2 if fused else 1))
    yield WorkItem(part, "keys", of_keys, io * (forward + back), dim)
    yield WorkItem(part, "values", once * (forward + back), io * (forward + back), dim)
    if back:
        yield WorkItem(part, "back", 2 * once, 2 * io, dim)
    if fused:
        return
    tile = heads * tokens * keys
    # Written by a matmul, read for the maximum, for the sum, and for the probabilities.
    moved = tile * (forward * (16 + 2 * c) + back * (12 + 3 * c))
    one = 4 * heads * tokens * max(keys_per_block)
    yield WorkItem(part, "softmax", 0.0, moved, one, tile * (forward + back / 2))


def _connector_dims(config: ModelConfig) -> tuple[Number, Number]:
    v, c = config.vision, config.connector
    width = v.width * max(1, len(v.feature_layers)) / (1 + c.deepstack_levels)
    return width * (c.merge**2 if c.pool == "concat" else 1), c.hidden or config.decoder.width


def _connector(
    config: ModelConfig, times: Number, images: Number, patches: Number, fwd_bwd: ForwardBackward,
    c: int, tensor: int,
) -> Iterator[WorkItem]:  # fmt: skip
    D, own = config.decoder.width, config.connector
    merged, hidden = _connector_dims(config)
    tokens = own.relevance.budget or patches / own.merge**2 + config.vision.keep_class_token
    rows, n = images * tokens, times * (1 + own.deepstack_levels)
    if own.kind == "mlp":
        yield from _matmul("connector", n, rows, merged, hidden / tensor, fwd_bwd, c)
        yield from _matmul("connector", n, rows, hidden / tensor, D, fwd_bwd, c)
    else:
        yield from _matmul("connector", n, rows, merged, D, fwd_bwd, c)
    moved = n * (1 + 2 * fwd_bwd.backward) * rows * c * (2 * merged + D)
    yield WorkItem("connector", "move", 0.0, moved, c * rows * merged)


def _head(
    setup: StepSetup, times: Number, tokens: Number, fwd_bwd: ForwardBackward, c: int
) -> Iterator[WorkItem]:
    """Logits one chunk of the vocabulary at a time, recomputed in the backward pass."""
    assert isinstance(setup.config, ModelConfig)
    d = setup.config.decoder
    columns = d.vocab_size / setup.mesh.tensor / setup.mesh.pipeline
    recomputing = _outside(fwd_bwd)._replace(remat="full")
    yield from _matmul("head", times, tokens, d.width, columns, recomputing, c)
    logits = times * tokens * columns
    moved = logits * (16 + (8 + 2 * c) * fwd_bwd.backward)
    numbers = logits * (1 + fwd_bwd.backward)
    yield WorkItem("head", "softmax", 0.0, moved, 4 * tokens * columns, numbers)
