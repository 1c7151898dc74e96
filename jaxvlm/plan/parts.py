"""A train step as what one device does: matmuls, and what moves through its memory.

Matmuls are listed one by one with their FLOPs and the bytes that they read and write; norms,
activations, residuals and softmaxes are taken as one pass each over what they read and write,
for compilers fuse them. Nothing is traced: a step is listed in less than a millisecond.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from jaxvlm.config import DualConfig, ModelConfig, feature_blocks, layer_windows
from jaxvlm.parallel.mesh import BATCH_AXES
from jaxvlm.plan import learned
from jaxvlm.plan.learned import Learned
from jaxvlm.plan.memory import Setup

Number = float | int
Network = ModelConfig | DualConfig
TOWERS = ("vision", "top", "connector", "decoder")


class Op(NamedTuple):
    """Work of one device, all its repetitions in a step together."""

    part: str
    """vision | top | connector | decoder | head | update."""
    kind: str
    """forward | input | weight: matmuls with weights, and their gradients; keys | values | back:
    attention's products; softmax | activation | move: no matmul."""
    flops: float
    bytes: float
    """Read and written."""
    size: float = 0.0
    """Of matmuls the smaller side of the weights, or a head's dim; else an array's bytes."""
    numbers: float = 0.0
    """That a softmax or an activation is of."""


class Passes(NamedTuple):
    """How often a part is gone through in a step."""

    back: bool
    """Gradients go back through it."""
    learns: float
    """The share of its blocks' weights whose own gradients are taken, 0..1; experts left out."""
    experts: float
    """Of its experts'."""
    other: float
    """Of its weights outside of blocks."""
    remat: str

    @property
    def again(self) -> bool:
        """Its matmuls are done a second time for the backward pass."""
        return self.back and self.remat in ("full", "offload")

    @property
    def scores_again(self) -> bool:
        """Attention's are."""
        return self.back and self.remat != "none"


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
        """Of keys on a device: heads that ``tensor`` does not divide are whole on each."""
        return self.kv_heads * self.head_dim / (1 if self.kv_heads % tensor else tensor)


class Weights(NamedTuple):
    """Parameters of a tower, vectors left out."""

    blocks: float
    """Of its blocks, experts left out."""
    experts: float
    other: float
    """Of all else: stems, tables, output matrices."""
    layers: int

    @property
    def total(self) -> float:
        """All."""
        return self.blocks + self.experts + self.other


def blocks(config: Network) -> dict[str, Block]:
    """Tower -> its block; those that the model has."""
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
    return {"vision": vision, "top": vision, "decoder": decoder}


def layers(config: Network) -> dict[str, int]:
    """Tower -> blocks that are run."""
    if isinstance(config, DualConfig):
        return {"vision": config.vision.depth, "text": config.text.depth}
    depth, trunk = max(feature_blocks(config.vision)), config.vision.trunk
    return {
        "vision": trunk or depth,
        "top": max(0, depth - trunk) if trunk else 0,
        "decoder": config.decoder.depth,
    }


@functools.lru_cache(maxsize=256)
def weights(config: Network) -> dict[str, Weights]:
    """Tower -> its parameters, from the config alone."""
    v = config.vision
    depth, trunk = v.depth, v.trunk
    own = {"vision": trunk or depth, "top": depth - trunk if trunk else 0}
    own |= {"decoder": config.decoder.depth} if isinstance(config, ModelConfig) else {}
    own |= {"text": config.text.depth} if isinstance(config, DualConfig) else {}
    made, other = {}, _other_weights(config)
    for tower, b in blocks(config).items():
        attention = 2 * b.width * b.head_dim * (b.heads + b.kv_heads)
        mlp = (3 if b.gated else 2) * b.width * b.mlp
        dense = attention + (b.width * b.experts if b.experts else mlp)
        n, experts = own[tower], b.experts * mlp
        made[tower] = Weights(float(n * dense), float(n * experts), float(other.get(tower, 0)), n)
    if "connector" in other:
        made["connector"] = Weights(0.0, 0.0, float(other["connector"]), 0)
    return made


def _other_weights(config: Network) -> dict[str, Number]:
    """Tower -> parameters outside of its blocks."""
    v = config.vision
    patch = 3 * v.frames * v.patch_size**2 * v.width
    table = (v.image_size // v.patch_size) ** 2 * v.width if v.position == "learned" else 0
    found: dict[str, Number] = {"vision": patch + table}
    if isinstance(config, DualConfig):
        t, E = config.text, config.embed_dim
        pool = 4 * v.width**2 + 2 * v.width * v.mlp_dim if v.pool == "attention" else 0
        found["vision"] += pool + v.width * E * ("vision" in config.project)
        tables = (t.vocab_size + t.max_length + t.num_types) * t.width
        found["text"] = tables + t.pooler * t.width**2 + t.width * E * ("text" in config.project)
        return found
    c, d = config.connector, config.decoder
    merged, hidden = _connector_dims(config)
    one = merged * hidden + hidden * d.width if c.kind == "mlp" else merged * d.width
    found["connector"] = (1 + c.levels) * one
    found["decoder"] = (1 if d.tied_embeddings or not d.head else 2) * d.vocab_size * d.width
    return found


def passes(setup: Setup) -> dict[str, Passes]:
    """Tower -> how often a step goes through it; a tower before all that learns has no way back."""
    config, before, made = setup.config, False, {}
    dual, found = isinstance(config, DualConfig), learned_of(setup)
    for tower in ("vision", "text") if dual else TOWERS:
        here = found.get(tower, learned.NOTHING)
        of = {"connector": None, "top": config.vision}.get(tower, getattr(config, tower, None))
        shares = (here.blocks, here.experts, here.other)
        made[tower] = Passes(here.back or before, *shares, of.remat if of else "none")
        before = not dual and (before or here.back)
    return made


def learned_of(setup: Setup) -> Mapping[str, Learned]:
    """Tower -> what of it learns."""
    if setup.frozen == ("*",):
        return {}
    return learned.of(setup.config, setup.frozen)


def ops(setup: Setup, width: int, fused: bool) -> list[Op]:
    """What a device does in a step, the optimizer's update left out.

    Args:
        setup: what is planned.
        width: bytes of a number in the compute dtype.
        fused: attention keeps no scores in memory, and leaves out what a causal mask hides.
    """
    return list(_ops(setup, width, fused))


def _ops(setup: Setup, c: int, fused: bool) -> Iterator[Op]:
    mesh = setup.mesh
    config: Network = setup.config
    rows = setup.rows / math.prod(getattr(mesh, axis) for axis in (*BATCH_AXES, "context"))
    rows = rows / setup.microbatches
    if setup.pictures and "vision" in blocks(config):
        yield from _pictures(setup, rows, c, fused)
    if not isinstance(config, DualConfig):
        yield from _decoder(setup, rows, c, fused)
    elif "text" in config.towers and setup.length:
        yield from _texts(setup, config, rows, c, fused)


def likeness(pairs: Number, width: Number, products: Number = 1) -> list[Op]:
    """Each query beside each document: tiles of pairs, which are made once more on the way back.

    Args:
        pairs: of a device's queries with all documents.
        width: of a vector.
        products: of vectors, for a pair.
    """
    each = pairs * products
    return [
        Op("loss", "forward", 8.0 * each * width, 0.0, width),
        Op("loss", "softmax", 0.0, 16.0 * each, 4.0 * each, 2.0 * each),
    ]


def _pictures(setup: Setup, rows: Number, c: int, fused: bool) -> Iterator[Op]:
    """The vision tower and the connector."""
    config, mesh, times = setup.config, setup.mesh, setup.microbatches
    v, gone, run = config.vision, passes(setup), layers(config)
    patches, a_row = pictures(setup)
    images = rows * setup.pictures / mesh.stage
    tokens = images * (patches + v.class_token)
    k = 3 * v.frames * v.patch_size**2
    stem = _outside(gone["vision"])
    yield from _matmul("vision", times, images * patches, k, v.width, stem, c)
    near = min(a_row, (v.window // v.patch_size) ** 2) if v.window else a_row
    for tower, b in blocks(config).items():
        if tower in ("vision", "top") and run[tower]:
            n, ways = run[tower], gone[tower]
            windowed = sum(i not in v.full_layers for i in range(n)) if v.window else 0
            seen = [a_row] * (n - windowed) + [near if fused else a_row] * windowed
            yield from _stack(tower, b, times, tokens, seen, False, ways, c, mesh.tensor, fused)
    if isinstance(config, ModelConfig):
        ways = _outside(gone["connector"])
        yield from _connector(config, times, images, patches, ways, c, mesh.tensor)


def _texts(setup: Setup, config: DualConfig, rows: Number, c: int, fused: bool) -> Iterator[Op]:
    """The text tower."""
    mesh, times = setup.mesh, setup.microbatches
    t, ways = config.text, passes(setup)["text"]
    seen, tokens = [setup.length] * t.depth, rows * setup.length
    b = blocks(config)["text"]
    yield from _stack("text", b, times, tokens, seen, t.causal, ways, c, mesh.tensor, fused)
    table = t.vocab_size * t.width * ways.other  # its gradient is written whole
    moved = times * tokens * t.width * c * (5 if ways.back else 2) + 8 * table
    yield Op("text", "move", 0.0, moved, tokens * t.width * c)


def _decoder(setup: Setup, rows: Number, c: int, fused: bool) -> Iterator[Op]:
    """The decoder's blocks, embeddings and head."""
    assert isinstance(setup.config, ModelConfig)
    mesh, times, d = setup.mesh, setup.microbatches, setup.config.decoder
    tokens, ways = rows * setup.length, passes(setup)["decoder"]
    # Rows in parts are attended to whole, by plain matmuls, unless heads are exchanged for them.
    fused = fused and (mesh.context == 1 or setup.strategy.context == "ulysses")
    seen = [float(min(w or setup.length, setup.length)) for w in layer_windows(d)]
    seen = seen if fused else [float(setup.length)] * d.depth
    mine, b = seen[: max(1, d.depth // mesh.stage)], _on(setup, blocks(setup.config)["decoder"])
    yield from _stack(
        "decoder", b, times, tokens, mine, True, ways, c, mesh.tensor, fused, mesh.expert
    )
    size = tokens * d.width * c
    yield Op("decoder", "move", 0.0, times * size * (5 if ways.back else 2), size)
    if d.head:
        yield from _head(setup, times, tokens, ways, c)


def _on(setup: Setup, b: Block) -> Block:
    """The block as the platform runs it: on CPU every expert works on every row."""
    if setup.platform != "cpu" or not b.experts:
        return b
    return b._replace(chosen=b.chosen * b.experts)


def _outside(ways: Passes) -> Passes:
    """Of matmuls outside of the tower's blocks."""
    return ways._replace(learns=ways.other)


def pictures(setup: Setup) -> tuple[Number, Number]:
    """(patches of a picture, patches that one attends to where no mask is used)."""
    v = setup.config.vision
    if v.packed:
        return setup.patches / max(1, setup.pictures), float(setup.patches)
    patches = float((v.image_size // v.patch_size) ** 2)
    return patches, patches + v.class_token


def _matmul(
    part: str, times: Number, rows: Number, k: Number, n: Number, ways: Passes, c: int,
    again: bool = True, extra: Number = 0.0,
) -> Iterator[Op]:  # fmt: skip
    """``rows x k`` by weights ``k x n``, with its gradients; ``extra`` bytes of other weights."""
    flops, side = 2 * rows * k * n * times, min(k, n)
    sent = times * (c * (rows * k + k * n + rows * n) + extra)
    forward = 1 + (again and ways.again)
    yield Op(part, "forward", forward * flops, forward * sent, side)
    if ways.back:
        yield Op(part, "input", flops, sent, side)
    if ways.learns:  # the weights' gradient is float32
        written = 4 * k * n + 4 / c * extra
        sent = times * (c * rows * (k + n) + written)
        yield Op(part, "weight", ways.learns * flops, ways.learns * sent, side)


def _stack(
    part: str, b: Block, times: Number, tokens: Number, seen: Sequence[Number], causal: bool,
    ways: Passes, c: int, tensor: int, fused: bool, shards: int = 1,
) -> Iterator[Op]:  # fmt: skip
    """Blocks: ``seen`` has the keys that a query meets in each."""
    n, D, F = len(seen), b.width, b.mlp / tensor
    q, kv = b.heads * b.head_dim / tensor, b.kv_width(tensor)
    for out in (q, kv, kv):
        yield from _matmul(part, n * times, tokens, D, out, ways, c)
    yield from _matmul(part, n * times, tokens, q, D, ways, c)
    if b.experts:
        yield from _matmul(part, n * times, tokens, D, b.experts, ways, c)
        yield from _experts(part, b, n * times, tokens, ways, c, tensor, shards)
    else:
        for _ in range(2 if b.gated else 1):
            yield from _matmul(part, n * times, tokens, D, F, ways, c)
        yield from _matmul(part, n * times, tokens, F, D, ways, c, again=False)
    yield from _scores(part, times, tokens, seen, causal, q, kv, b.heads / tensor, ways, c, fused)
    wide = F * (b.chosen if b.experts else 1)
    rounds = n * times * (1 + ways.scores_again + 2 * ways.back)
    yield Op(part, "move", 0.0, rounds * tokens * c * (9 * D + 2 * (q + kv)), c * tokens * D)
    numbers = n * times * (1 + ways.scores_again + ways.back) * tokens * wide
    moved = rounds * tokens * c * (3 if b.gated else 2) * wide
    yield Op(part, "activation", 0.0, moved, c * tokens * wide, numbers)


def _experts(
    part: str,
    b: Block,
    times: Number,
    tokens: Number,
    ways: Passes,
    c: int,
    tensor: int,
    shards: int,
) -> Iterator[Op]:
    """Grouped matmuls: each token's rows, all experts' weights of this device."""
    rows, F, own = tokens * b.chosen, b.mlp / tensor, b.experts / shards
    ways = ways._replace(learns=ways.experts)
    for k, n, again in ((b.width, F, True), (b.width, F, True), (F, b.width, False)):
        yield from _matmul(part, times, rows, k, n, ways, c, again, (own - 1) * k * n * c)
    moved = rows * b.width * c
    yield Op(part, "move", 0.0, times * (2 + 2 * ways.back) * moved, moved)


def _scores(
    part: str, times: Number, tokens: Number, seen: Sequence[Number], causal: bool, q: Number,
    kv: Number, heads: Number, ways: Passes, c: int, fused: bool,
) -> Iterator[Op]:  # fmt: skip
    """Attention's two products and the softmax between."""
    keys = times * sum(seen) * (0.5 if causal and fused else 1.0)
    once, dim = 2 * tokens * keys * q, q / heads
    forward, back = 1 + ways.scores_again, ways.back
    io = times * len(seen) * tokens * c * (q + kv)
    # Scores that are not kept are made again in the backward pass.
    yield Op(
        part, "keys", once * (forward + back * (2 if fused else 1)), io * (forward + back), dim
    )
    yield Op(part, "values", once * (forward + back), io * (forward + back), dim)
    if back:
        yield Op(part, "back", 2 * once, 2 * io, dim)
    if fused:
        return
    tile = heads * tokens * keys
    # Written by a matmul, read for the maximum, for the sum, and to make what the next one reads.
    moved = tile * (forward * (16 + 2 * c) + back * (12 + 3 * c))
    one = 4 * heads * tokens * max(seen)
    yield Op(part, "softmax", 0.0, moved, one, tile * (forward + back / 2))


def _connector_dims(config: ModelConfig) -> tuple[Number, Number]:
    v, c = config.vision, config.connector
    width = v.width * max(1, len(v.feature_layers)) / (1 + c.levels)
    return width * (c.merge**2 if c.pool == "concat" else 1), c.hidden or config.decoder.width


def _connector(
    config: ModelConfig, times: Number, images: Number, patches: Number, ways: Passes, c: int,
    tensor: int,
) -> Iterator[Op]:  # fmt: skip
    D, own = config.decoder.width, config.connector
    merged, hidden = _connector_dims(config)
    tokens = own.relevance.budget or patches / own.merge**2 + config.vision.keep_class_token
    rows, n = images * tokens, times * (1 + own.levels)
    if own.kind == "mlp":
        yield from _matmul("connector", n, rows, merged, hidden / tensor, ways, c)
        yield from _matmul("connector", n, rows, hidden / tensor, D, ways, c)
    else:
        yield from _matmul("connector", n, rows, merged, D, ways, c)
    moved = n * (1 + 2 * ways.back) * rows * c * (2 * merged + D)
    yield Op("connector", "move", 0.0, moved, c * rows * merged)


def _head(setup: Setup, times: Number, tokens: Number, ways: Passes, c: int) -> Iterator[Op]:
    """Logits a chunk of columns at a time; they are made again in the backward pass."""
    assert isinstance(setup.config, ModelConfig)
    d = setup.config.decoder
    columns = d.vocab_size / setup.mesh.tensor / setup.mesh.stage
    again = _outside(ways)._replace(remat="full")
    yield from _matmul("head", times, tokens, d.width, columns, again, c)
    logits = times * tokens * columns
    moved = logits * (16 + (8 + 2 * c) * ways.back)
    yield Op("head", "softmax", 0.0, moved, 4 * tokens * columns, logits * (1 + ways.back))
