"""Gradient caching against the whole batch on one device: each loss, in mini-batches, on meshes.

    python -m benchmarks.gradcache_parity

A cell is a step's gradients, of every parameter, temperature and bias too, against those of all
rows at once on one device; float32, dropout on. Its figure is the largest error of a leaf by
docs/design.md's measure (1e-5 is the bar). A step is compiled once for all losses of its model,
and told which to take. Models and cells that the result has are kept.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.common import environment, kept, worst_leaf, write
from jaxvlm.config import (
    DecoderConfig,
    DualConfig,
    EmbeddingConfig,
    LoraConfig,
    MeshConfig,
    ModelConfig,
    StrategyConfig,
    TextConfig,
    VisionConfig,
)
from jaxvlm.losses.contrastive import InfoNCE
from jaxvlm.losses.matryoshka import Matryoshka
from jaxvlm.losses.quantized_embeddings import QuantizedEmbeddings
from jaxvlm.losses.ranking import CoSENT, CosineRegression, Distill, MarginMSE, Triplet
from jaxvlm.losses.sigmoid import Sigmoid
from jaxvlm.losses.softmax import DIRECTIONS
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.sharding import to_global
from jaxvlm.spmd.model import build_model
from jaxvlm.spmd.train_step import assemble
from jaxvlm.train.grad_accum import total
from jaxvlm.train.gradcache import MiniBatch
from jaxvlm.types import Batch, Embeddings, Pairs, Sums

NAME = "gradcache_parity"
EXAMPLES, DOCUMENTS, VOCAB, TOKENS = 16, 2, 32, 8
LOSSES: dict[str, Callable[[Any], Any]] = {
    "info_nce": lambda mesh: InfoNCE(0.0, mesh=mesh),
    "info_nce, all ways, mask": lambda mesh: InfoNCE(
        0.0, directions=DIRECTIONS, false_negative_filter="absolute", margin=0.1, mesh=mesh
    ),
    "info_nce, each way, relative mask": lambda mesh: InfoNCE(
        0.0,
        directions=DIRECTIONS[:2],
        softmax_scope="each",
        false_negative_filter="relative",
        margin=0.1,
        mesh=mesh,
    ),
    "info_nce, own negatives": lambda mesh: InfoNCE(0.0, negatives_from="own", mesh=mesh),
    "sigmoid": lambda mesh: Sigmoid(mesh=mesh),
    "triplet, cosine": lambda mesh: Triplet(0.3, "cosine"),
    "triplet, euclidean": lambda mesh: Triplet(0.3, "euclidean"),
    "cosent": lambda mesh: CoSENT(),
    "cosent, scale 1": lambda mesh: CoSENT(1.0),
    "cosine": lambda mesh: CosineRegression(),
    "margin_mse": lambda mesh: MarginMSE(),
    "distill": lambda mesh: Distill(temperature=0.1),
    "matryoshka of info_nce": lambda mesh: Matryoshka(InfoNCE(0.0, mesh=mesh), (4, 16)),
    "matryoshka of sigmoid": lambda mesh: Matryoshka(Sigmoid(mesh=mesh), (4, 16), (0.5, 1.0)),
    "int8 and binary of info_nce": lambda mesh: QuantizedEmbeddings(
        InfoNCE(0.0, mesh=mesh), ("int8", "binary")
    ),
}
TOWERS = DualConfig(
    vision=VisionConfig(
        image_size=16, patch_size=8, width=16, depth=1, num_heads=8, mlp_dim=16, pool="attention",
        dropout=0.1,
    ),
    text=TextConfig(
        vocab_size=VOCAB, width=16, depth=1, num_heads=8, mlp_dim=16, max_length=TOKENS,
        dropout=0.1, attention_dropout=0.1,
    ),
    embed_dim=16,
    has_bias=True,
    bias=-1.0,
)  # fmt: skip
DECODER = ModelConfig(
    # A key bias has no gradient but for rounding: of a tower whose leaves are as large as the mean
    # one's that is at the bar. What blocks add is scaled down, so theirs are smaller.
    vision=dataclasses.replace(TOWERS.vision, pool="none", remat="dots", layer_scale=0.25),
    decoder=DecoderConfig(
        vocab_size=VOCAB, width=16, depth=4, num_heads=2, num_kv_heads=2, head_dim=8, mlp_dim=16,
        dropout=0.1, remat="dots",
    ),
)  # fmt: skip
EMBEDDINGS = EmbeddingConfig(dim=16, learn_scale=True, learn_bias=True, bias=-1.0)
# MaxSim adds up to eight cosines. Times 20, as one cosine is, they would be logits above 100, whose
# last bit in float32 is 1e-5 of a softmax's weights, in mini-batches or whole.
OF_TOKEN = dataclasses.replace(EMBEDDINGS, pool="tokens", scale=0.0)
LORA = LoraConfig(rank=2, dropout=0.1, targets=("*/stack/*",))
KINDS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "two towers": (TOWERS, ()),
    "image tower locked": (
        dataclasses.replace(TOWERS, vision=dataclasses.replace(TOWERS.vision, dropout=0.0)),
        ("vision/*",),
    ),
    "adapters": (dataclasses.replace(TOWERS, lora=LORA), ()),
    "decoder": (DECODER, ()),
    "decoder, an embedding a token": (DECODER, ()),
}
DDP = StrategyConfig(params=(), all_gathered=(), gradients=(), optimizer=())
FSDP = StrategyConfig()


class Cell(NamedTuple):
    """Where a step runs, and in what mini-batches of queries and of documents."""

    mesh: str
    axes: MeshConfig
    strategy: StrategyConfig
    mini_batches: tuple[int, int]


WHOLE = Cell("1", MeshConfig(1), FSDP, (0, 0))
FEW = (
    Cell("1", MeshConfig(1), FSDP, (1, 1)),
    Cell("1", MeshConfig(1), FSDP, (3, 5)),
    Cell("data 2 x fsdp 2 x tensor 2", MeshConfig(2, 2, 2), FSDP, (3, 5)),
)
MORE = (
    Cell("ddp 2", MeshConfig(2), DDP, (3, 5)),
    Cell("fsdp 4", MeshConfig(1, 4), FSDP, (1, 1)),
    Cell("tensor 2", MeshConfig(1, tensor=2), FSDP, (0, 0)),
    Cell("ddp 8", MeshConfig(8), DDP, (1, 3)),
    Cell("ddp 4", MeshConfig(4), DDP, (0, 0)),
    Cell("fsdp 8", MeshConfig(1, 8), FSDP, (0, 3)),
    Cell("tensor 8", MeshConfig(1, tensor=8), FSDP, (3, 5)),
)
STAGES = (
    Cell("pipeline 2", MeshConfig(1, pipeline=2), FSDP, (3, 5)),
    Cell("data 2 x pipeline 4", MeshConfig(2, pipeline=4), DDP, (1, 3)),
)
ALL = tuple(name for name in LOSSES if name != "cosent, scale 1")
OF_TOKENS = (
    "info_nce",
    "info_nce, each way, relative mask",
    "sigmoid",
    "cosent, scale 1",
    "margin_mse",
)
FEWER = ("info_nce", "sigmoid", "margin_mse")
PLAN: tuple[tuple[str, tuple[str, ...], tuple[Cell, ...]], ...] = (
    ("adapters", FEWER, FEW[1:]),
    ("decoder, an embedding a token", OF_TOKENS, (FEW[1], STAGES[0], MORE[0])),
    ("decoder", ALL, (FEW[1], STAGES[0])),
    ("image tower locked", FEWER, FEW[1:]),
    ("two towers", ALL, FEW + MORE),
    ("decoder", ALL, STAGES[1:]),
)
"""Model, losses, cells."""


@dataclasses.dataclass(frozen=True)
class Chosen:
    """One of several losses: that whose number the examples bear."""

    losses: tuple[Any, ...]
    additive: bool = False

    def coefficients(self) -> dict[str, float]:
        """One term."""
        return {"loss": 1.0}

    def weights(self, batch: Pairs) -> dict[str, Any]:
        """None: each loss divides by its own."""
        return {"loss": jnp.float32(1)}

    def __call__(self, out: Embeddings, batch: Pairs) -> Sums:
        """The loss."""

        def one(loss: Any) -> jax.Array:
            weights = loss.weights(batch)
            scale = {n: f / weights[n] for n, f in loss.coefficients().items()}
            return total(loss(out, batch), scale)

        which = jnp.max(jnp.asarray(batch.example_id))
        branches = [functools.partial(one, loss) for loss in self.losses]
        return Sums({"loss": jax.lax.switch(which, branches)}, {})


def rows(rng: np.random.Generator, count: int, seen: np.ndarray) -> Batch:
    """A text a row, and an image where ``seen``."""
    length = rng.integers(3, TOKENS + 1, (count, 1))
    real = np.arange(TOKENS) < length
    places = np.broadcast_to(np.arange(TOKENS, dtype=np.int32), (count, 1, TOKENS)).copy()
    return Batch(
        tokens=rng.integers(1, VOCAB, real.shape).astype(np.int32),
        loss_weight=np.zeros(real.shape, np.float32),
        positions=places,
        segment=real.astype(np.int32),
        pixels=rng.integers(0, 256, (count, 1, 16, 16, 3), np.uint8),
        image_start=np.where(seen, 0, -1).astype(np.int32)[:, None],
    )


@functools.cache
def batch() -> Pairs:
    """Labels, a missing negative, contents that come twice, a teacher's scores."""
    rng = np.random.default_rng(0)
    query = rows(rng, EXAMPLES, np.arange(EXAMPLES) % 2 == 0)._replace(
        example_id=np.arange(EXAMPLES, dtype=np.int32)
    )
    count = EXAMPLES * DOCUMENTS
    document = rows(rng, count, np.arange(count) % 3 == 0)._replace(
        example_id=np.arange(count, dtype=np.int32)
    )
    document = jax.tree.map(lambda x: x.reshape(EXAMPLES, DOCUMENTS, *x.shape[1:]), document)
    there = np.ones((EXAMPLES, DOCUMENTS), bool)
    there[3, 1] = False
    key = np.arange(count, dtype=np.int32).reshape(EXAMPLES, DOCUMENTS)
    key[7, 1] = key[2, 0]
    group = np.where(np.arange(EXAMPLES) < 4, 0, -1).astype(np.int32)
    teacher = rng.uniform(size=there.shape).astype(np.float32)
    return Pairs(query, document, there, 100 + key[:, 0], key, group, teacher)


def recorded() -> optax.GradientTransformation:
    """Keeps the gradients in the optimizer's state."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda grads, state, params=None: (grads, grads),
    )


def gradients(
    kind: str, losses: Sequence[str], cell: Cell
) -> list[tuple[float, dict[str, np.ndarray]]]:
    """Each loss and every gradient of a step."""
    config, frozen = KINDS[kind]
    embeddings = None
    if isinstance(config, ModelConfig):
        embeddings = EMBEDDINGS if kind == "decoder" else OF_TOKEN
    mesh = make_mesh(cell.axes, jax.devices()[: np.prod(dataclasses.astuple(cell.axes))])
    model = build_model(config, mesh, cell.strategy, embeddings=embeddings)
    cut = (MiniBatch(cell.mini_batches[0]), MiniBatch(cell.mini_batches[1]))
    made = Chosen(tuple(LOSSES[loss](mesh) for loss in losses))
    step, _, init = assemble(model, made, recorded(), frozen=frozen, mini_batches=cut, seed=5)
    rng = np.random.default_rng(1)
    first = {p: np.asarray(x) for p, x in sorted(jax.device_get(model.init(0)).items())}
    for path, x in first.items():  # adapters that do something, less than their maps
        if path.endswith("lora_b"):
            first[path] = 0.1 * rng.standard_normal(x.shape).astype(np.float32)
    found = []
    for number in range(len(losses)):
        state = init({p: jax.device_put(x, model.shardings[p]) for p, x in first.items()})
        mine = batch()._replace(example_id=np.full(EXAMPLES, number, np.int32))
        state, metrics = step(state, to_global(mesh, mine, EXAMPLES))
        found.append((float(metrics["loss"]), jax.device_get(state.opt_state)))
    return found


def main() -> None:
    """Run what is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.parse_args()
    # Read when the first device is asked for. Compiling is all the cost here; and with a thread a
    # device collectives could wait for each other for ever.
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    os.environ.setdefault("NPROC", "32")
    jax.config.update("jax_num_cpu_devices", 8)
    before, table = environment(), kept(NAME)
    whole = functools.cache(lambda kind, losses: gradients(kind, losses, WHOLE))
    for kind, losses, cell in [(k, x, c) for k, x, cells in PLAN for c in cells]:
        here = {"model": kind, "mesh": cell.mesh, "chunks": list(cell.mini_batches)}
        there = [row["loss"] for row in table if all(row[k] == v for k, v in here.items())]
        if not (left := tuple(x for x in losses if x not in there)):
            continue
        wanted = whole(kind, left)
        for loss, mine, theirs in zip(left, gradients(kind, left, cell), wanted, strict=True):
            error, path = worst_leaf(mine[1], theirs[1])
            off = abs(mine[0] - theirs[0]) / abs(theirs[0])
            size = int(np.prod(dataclasses.astuple(cell.axes)))
            row = {**here, "loss": loss, "devices": size, "leaves": len(mine[1])}
            table.append({**row, "loss_error": off, "worst_gradient": error, "of": path})
            print(table[-1], flush=True)
        write(f"{NAME}.json", {"environment": before, "rows": table})


if __name__ == "__main__":
    main()
