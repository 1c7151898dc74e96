"""Gradient caching of other libraries: sentence-transformers' cached loss, open_clip's loop.

    python -m benchmarks.gradcache --part peers

The same model, weights, batch and mini-batches; steps of all, interleaved. A library that can't be
imported is left out, with a message. ``open_clip`` comes with ``pip install open_clip_torch``.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import re
import resource
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.common import summary, timed, worst_leaf
from benchmarks.gradcache import BOTH_HOLD, CHUNK, TOKENS, pairs
from jaxvlm.config import MeshConfig
from jaxvlm.hf.families import bert, dual_encoders
from jaxvlm.losses.contrastive import InfoNCE
from jaxvlm.losses.softmax import DIRECTIONS
from jaxvlm.models.vit import normalised
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.sharding import to_global
from jaxvlm.spmd.gradcache import pair_runner
from jaxvlm.spmd.model import Model, build_model
from jaxvlm.train.grad_accum import scales
from jaxvlm.train.gradcache import MiniBatch
from jaxvlm.types import Batch, Pairs, Params

SCALE = "head/scale"
WIDTH, DEPTH, HEADS, MLP, WORDS = 192, 4, 3, 768, 4096


class Peer(NamedTuple):
    """A step of theirs and of ours, which take the same gradient."""

    package: str
    theirs: Callable[[], float]
    """Takes the gradient; the loss."""
    forget: Callable[[], None]
    """Drops their gradients."""
    grads: Callable[[], Params]
    """Theirs of the last step, by our names."""
    ours: Callable[[], Any]
    """Ours of the same step: the sums, and the gradients."""
    temporaries: int
    """Bytes of our step's, by its compiler."""


def our_step(model: Model, params: Params, batch: Pairs, loss: Any) -> tuple[Callable, int]:
    """The compiled step, and the bytes of its temporaries."""
    runner = pair_runner(model, list(params), (MiniBatch(CHUNK), MiniBatch(CHUNK)))
    run = jax.jit(lambda p, x: runner.loss_grad(p, {}, x, loss, scales(loss, x)))
    there = to_global(model.mesh, batch, BOTH_HOLD)
    made = run.lower(params, there).compile()
    size = made.memory_analysis().temp_size_in_bytes
    return lambda: jax.block_until_ready(made(params, there)), size


def one_device(config: Any) -> Model:
    """The model on it."""
    return build_model(config, make_mesh(MeshConfig(1), jax.devices()[:1]))


def sentence_transformers() -> Peer:
    """Their cached loss, of a small BERT and pairs of texts."""
    import torch
    from sentence_transformers import SentenceTransformer, losses, models
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    dims = BertConfig(
        vocab_size=WORDS, hidden_size=WIDTH, num_hidden_layers=DEPTH, num_attention_heads=HEADS,
        intermediate_size=MLP, max_position_embeddings=64, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    theirs, count = BertModel(dims).train(), BOTH_HOLD
    ids = np.random.default_rng(0).integers(3, WORDS, (2, count, TOKENS)).astype(np.int64)

    class Words(torch.nn.Module):
        """A module of theirs that takes ids as they are."""

        def __init__(self) -> None:
            super().__init__()
            self.model = theirs

        def forward(self, features: dict[str, Any]) -> dict[str, Any]:
            out = self.model(features["input_ids"], features["attention_mask"])
            return features | {"token_embeddings": out.last_hidden_state}

    pooling = models.Pooling(WIDTH, "mean")
    sentence = SentenceTransformer(modules=[Words(), pooling, models.Normalize()], device="cpu")
    loss = losses.CachedMultipleNegativesRankingLoss(sentence, scale=20.0, mini_batch_size=CHUNK)
    features = [
        {"input_ids": torch.as_tensor(x), "attention_mask": torch.ones(count, TOKENS).long()}
        for x in ids
    ]

    def their_step() -> float:
        sentence.zero_grad()
        value = loss([dict(x) for x in features], torch.arange(count))
        value.backward()
        return value.item()

    config = bert.config_from_hf(dims.to_dict() | {"model_type": "bert"})
    config = dataclasses.replace(
        config, normalize=True, text=dataclasses.replace(config.text, pool="mean")
    )
    names = bert.weights(config)
    state = {k: v.detach().numpy() for k, v in theirs.state_dict().items()}
    params = {p: jax.numpy.asarray(x) for p, x in names.load(state).items()}

    def grads() -> Params:
        return names.load(
            {
                k: np.zeros(v.shape, np.float32) if v.grad is None else v.grad.numpy()
                for k, v in theirs.named_parameters()
            }
        )

    made = our_step(one_device(config), params, texts(ids), InfoNCE(temperature=0.05))
    return Peer("sentence-transformers", their_step, sentence.zero_grad, grads, *made)


def texts(ids: np.ndarray) -> Pairs:
    """A text and a text an example."""
    count = ids.shape[1]
    places = np.broadcast_to(np.arange(TOKENS, dtype=np.int32), (count, 1, TOKENS)).copy()
    sides = [
        Batch(x.astype(np.int32), np.zeros(x.shape, np.float32), places, np.ones(x.shape, np.int32))
        for x in ids
    ]
    number = np.arange(count, dtype=np.int32)
    document = jax.tree.map(lambda x: x[:, None], sides[1])
    return Pairs(sides[0], document, np.ones((count, 1), bool), number, number[:, None])


CLIP = {
    "model_type": "clip",
    "projection_dim": 128,
    "vision_config": {"image_size": 64, "patch_size": 8},
    "text_config": {"vocab_size": WORDS, "max_position_embeddings": TOKENS, "eos_token_id": 2},
}
"""As a ``config.json`` says it; 2: a text ends at its largest id, as open_clip has it."""
SHARED = {
    "hidden_size": WIDTH,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": HEADS,
    "intermediate_size": MLP,
    "hidden_act": "gelu",
}
NAMES = {
    "text_model.embeddings.token_embedding.weight": "token_embedding.weight",
    "text_model.embeddings.position_embedding.weight": "positional_embedding",
    "text_model.final_layer_norm": "ln_final",
    "text_model.encoder.layers": "transformer.resblocks",
    "text_projection.weight": "text_projection",
    "vision_model.embeddings.class_embedding": "visual.class_embedding",
    "vision_model.embeddings.patch_embedding": "visual.conv1",
    "vision_model.embeddings.position_embedding.weight": "visual.positional_embedding",
    "vision_model.pre_layrnorm": "visual.ln_pre",
    "vision_model.post_layernorm": "visual.ln_post",
    "vision_model.encoder.layers": "visual.transformer.resblocks",
    "visual_projection.weight": "visual.proj",
    "self_attn.out_proj": "attn.out_proj",
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
}
"""transformers' -> open_clip's; queries, keys and values are one tensor there."""


def theirs_of(name: str, tensors: Mapping[str, Any]) -> Any:
    """The part of open_clip's tensors that transformers' ``name`` is, a view.

    Args:
        name: of the tensor.
        tensors: torch's, by open_clip's names.
    """
    spelled = name
    for ours, others in NAMES.items():
        spelled = spelled.replace(ours, others)
    if found := re.fullmatch(r"(.*)self_attn\.([qkv])_proj\.(weight|bias)", spelled):
        joined = tensors[f"{found[1]}attn.in_proj_{found[3]}"]
        return joined.chunk(3)["qkv".index(found[2])]
    found = tensors[spelled]
    return found.T if name.endswith("_projection.weight") else found


class Loader:
    """What ``train_one_epoch`` takes of a data loader: one batch in parts."""

    def __init__(self, images: Any, ids: Any):
        self.parts = list(zip(images.split(CHUNK), ids.split(CHUNK), strict=True))
        self.num_batches, self.num_samples = len(self.parts), len(images)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.parts)


def declare_operators() -> None:
    """Let PyPI's torchvision, which is built for CUDA, be imported with a torch for CPU.

    Its operators can't be loaded then, and it stumbles over two that are not declared; none of
    them is used here.
    """
    import torch

    try:
        version = importlib.metadata.version("torchvision")
    except importlib.metadata.PackageNotFoundError:
        return
    if torch.version.cuda or "+" in version:
        return
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor a, Tensor b, float c) -> Tensor")


def open_clip() -> Peer:
    """Their training loop's ``accum_freq``, of a small CLIP, images and texts."""
    import open_clip as theirs
    import torch
    from open_clip_train.train import train_one_epoch

    tower = {**SHARED, "layer_norm_eps": 1e-5}
    said = CLIP | {f"{t}_config": CLIP[f"{t}_config"] | tower for t in ("vision", "text")}
    config = dual_encoders.config_from_hf(said)
    model, names = one_device(config), dual_encoders.weights(config)
    batch = pairs(BOTH_HOLD, config)
    params = {p: np.asarray(x) for p, x in model.init(0).items()}
    size = {"layers": DEPTH, "width": WIDTH}
    net = theirs.CLIP(
        embed_dim=config.embed_dim,
        vision_cfg=dict(**size, head_width=WIDTH // HEADS, patch_size=8, image_size=64),
        text_cfg=dict(**size, heads=HEADS, context_length=TOKENS, vocab_size=WORDS),
        output_dict=True,
    )
    own = dict(net.named_parameters())
    with torch.no_grad():
        for name, x in names.dump(params).items():
            theirs_of(name, own).copy_(torch.tensor(x))
    assert sum(x.numel() for x in own.values()) == sum(x.size for x in params.values())
    seen = np.asarray(normalised(batch.query.pixels[:, 0], config.vision))
    images = torch.tensor(seen).permute(0, 3, 1, 2).contiguous()
    loader = Loader(images, torch.tensor(batch.document.tokens[:, 0]).long())
    clip, last = theirs.ClipLoss(), []

    def loss(**inputs: Any) -> Any:
        found = clip(**inputs)
        last[:] = [found["contrastive_loss"].item()]
        return found

    data = types.SimpleNamespace(dataloader=loader, set_epoch=lambda epoch: None)
    args = types.SimpleNamespace(
        device="cpu", precision="fp32", accum_freq=loader.num_batches, batch_size=CHUNK,
        skip_scheduler=True, distill=False, horovod=False, grad_clip_norm=None, rank=0,
        local_rank=0, world_size=1, log_every_n_steps=10**9, wandb=False, tensorboard=False,
        save_logs=False,
    )  # fmt: skip
    still = torch.optim.SGD(net.parameters(), lr=0.0)

    def their_step() -> float:
        train_one_epoch(net, {"train": data}, loss, 0, still, None, None, None, args)
        return last[0]

    def grads() -> Params:
        found = {name: p.grad for name, p in own.items()}
        return names.load({n: theirs_of(n, found).numpy() for n in names.tensors()})

    own_loss = InfoNCE(temperature=0.0, directions=DIRECTIONS[:2], softmax_scope="each")
    made = our_step(model, {p: jax.numpy.asarray(x) for p, x in params.items()}, batch, own_loss)
    return Peer("open_clip_torch", their_step, still.zero_grad, grads, *made)


def held(step: Callable[[], Any]) -> int:
    """Bytes that torch allocates for ``step`` and holds at once, at most."""
    import torch

    kinds = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds, profile_memory=True) as seen:
        step()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda e: e.start_ns())
    return int(np.cumsum([e.nbytes() for e in events]).max())


def agreement(peer: Peer) -> dict[str, Any]:
    """Loss and gradients of a step of theirs and of ours."""
    loss, theirs, (sums, ours) = peer.theirs(), peer.grads(), peer.ours()
    leaves = {path: g for path, g in theirs.items() if path != SCALE}
    worst, path = worst_leaf(ours, leaves)
    found = {
        "version": importlib.metadata.version(peer.package),
        "loss": {"theirs": loss, "ours": float(sums.terms["loss"]) / BOTH_HOLD},
        "leaves": len(leaves),
        "worst_gradient_leaf": worst,
        "of": path,
    }
    if SCALE in theirs:
        found["scale_gradient_theirs_to_ours"] = float(theirs[SCALE] / ours[SCALE])
    return found


def memory(peer: Peer) -> dict[str, int]:
    """Peak bytes of a step, without weights and gradients."""
    peer.forget()
    most = held(peer.theirs)
    gradients = sum(4 * x.size for x in peer.grads().values())
    return {"their_temporaries": most - gradients, "our_temporaries": peer.temporaries}


PEERS = {"sentence_transformers": sentence_transformers, "open_clip": open_clip}


def measure(rounds: int) -> dict[str, Any]:
    """Gradients, memory and time of each peer and of ours; steps of all in turns."""
    # Spinning at barriers makes torch ten times slower where other work shares the cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch

    torch.set_num_threads(2)
    declare_operators()  # transformers imports torchvision too, where it is there
    made: dict[str, Peer] = {}
    found: dict[str, dict[str, Any]] = {}
    for name, make in PEERS.items():
        try:
            made[name] = make()
        except ImportError as error:
            print(f"{name} is left out: {error}", flush=True)
            continue
        found[name] = agreement(made[name])
        print(name, found[name], flush=True)
    arms = {(n, who): getattr(p, who) for n, p in made.items() for who in ("theirs", "ours")}
    seconds: dict[tuple[str, str], list[list[float]]] = {arm: [] for arm in arms}
    for _ in range(rounds):
        for arm, step in arms.items():
            seconds[arm].append(timed(step))
            print(*arm, seconds[arm][-1], flush=True)
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name, peer in made.items():
        took = {who: summary(seconds[name, who]) for who in ("theirs", "ours")}
        ratios = {
            f"theirs_to_ours, {kind}": took["theirs"][kind] / took["ours"][kind]
            for kind in ("median_ms", "cpu_median_ms")
        }
        found[name] |= {**took, **ratios, **memory(peer)}
    return {"batch": BOTH_HOLD, "chunk": CHUNK, "peak_of_the_process": peak, **found}
