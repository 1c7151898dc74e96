"""Formula for a device's memory, in microseconds, to decide which candidates to trace.

Between steps it is the result of :func:`jaxvlm.planner.memory.step_memory.states`: parameters of
one kind (the same logical axes on their dims) are counted together. What a step needs in addition
is a formula of each block's dims, corrected by the traces of those candidates that were traced.
"""

from __future__ import annotations

import collections
import math
from typing import Any, NamedTuple

import numpy as np

from jaxvlm.config import (
    DecoderConfig,
    DualConfig,
    MeshConfig,
    ModelConfig,
    OuterConfig,
    StrategyConfig,
    feature_blocks,
)
from jaxvlm.models.vlm import DTYPES
from jaxvlm.nn.attention_backends import stores_scores
from jaxvlm.nn.grouped_matmul import kernel_of
from jaxvlm.parallel.mesh import BATCH_AXES
from jaxvlm.planner.memory import shared_memory
from jaxvlm.planner.memory.compilers import COMPILERS
from jaxvlm.planner.request.abstract_devices import BatchShape
from jaxvlm.planner.request.pairs import PairShapes
from jaxvlm.planner.request.per_object import per_object
from jaxvlm.spmd.model import Model
from jaxvlm.spmd.train_step import split

_TENSOR = ("heads", "kv_heads", "mlp", "vocab")
_STORED = ("params", "all_gathered", "optimizer", "offload", "replicated")
"""Fields of a strategy that determine how states are sharded."""


class _Mixture(NamedTuple):
    """Factors of a mixture of experts, per number in the token copies of its experts.

    They agree with traces of Qwen3-VL's two mixtures, with sequences of 2,048 and 4,096 tokens.
    """

    kept: float
    """Saved by a block for its backward pass, without remat."""
    inside: float
    """Alive at the block's peak."""


_MASKED = _Mixture(7.5, 18.5)
"""Expert parallelism: applied to the model width of each copy of all devices' tokens."""
_SHARED = _Mixture(4.7, 9.0)
"""The same, with a kernel that skips tokens of other devices, so that nothing is masked."""
_ALONE = _Mixture(4.0, 3.0)
"""All experts on each device: applied to the model and hidden widths. ``inside`` counts once per
expert where a grouped matmul copies its tokens per expert (see ``compilers.COMPILERS``).
"""


class Kind(NamedTuple):
    """Parameters that every mesh shards in the same way."""

    tower: str
    trained: bool
    layered: bool
    """Whether they are in the decoder's stack, which pipeline stages divide."""
    transposed: bool
    """Whether loops gather a dim that is not a layer's first; see ``compilers.COMPILERS``."""
    cast: bool
    """Whether they are stored in float32, and cast to the computation's dtype."""
    words: tuple[tuple[str, int], ...]
    """Logical axes of their dims that a mesh may shard, and the dims' sizes."""


class QuickStep(NamedTuple):
    """What a candidate's memory depends on."""

    mesh: MeshConfig
    strategy: StrategyConfig
    remat: str
    microbatches: int
    rows: int
    """Packed sequences in the batch, or examples, over all devices."""
    vision: str = ""
    """Remat of the vision tower, if it differs."""
    pairs: PairShapes | None = None
    """Shapes of an example, with its GradCache mini-batches, when training on pairs."""
    outer: OuterConfig | None = None
    """Outer updates of the mesh's islands; ``None``: there are none."""


class QuickMemory:
    """Estimates a device's bytes for one model and one set of trained parameters.

    Args:
        model: on one device.
        frozen: path patterns.
        length: tokens of a packed sequence.
        patches: patches of all images of a packed sequence.
        platform: cpu | gpu | tpu.
    """

    def __init__(
        self,
        model: Model[ModelConfig] | Model[DualConfig],
        frozen: tuple[str, ...],
        length: int,
        patches: int,
        platform: str,
    ):
        own, _ = split(model, model.shapes, frozen)
        self.config: ModelConfig | DualConfig = model.config
        self.length, self.patches = length, patches
        self.platform = platform
        self.number = np.dtype(DTYPES[model.config.dtype]).itemsize
        self._states: dict[tuple[Any, ...], dict[str, float]] = {}
        self.trained = {path.split("/")[0] for path in own}
        self.kinds: dict[Kind, int] = collections.defaultdict(int)
        stack, depth = _stack(self.config)
        for path, x in model.shapes.items():
            words = tuple(
                (word, size)
                for word, size in zip(model.logical[path], x.shape)
                if word in ("embed", "experts", "layers", *_TENSOR)
            )
            size = math.prod(x.shape) * np.dtype(x.dtype).itemsize
            layered = path.startswith(f"{stack}/")
            logical = model.logical[path]
            transposed = logical[:1] == ("layers",) and "embed" in logical[2:]
            cast = x.dtype == np.float32
            kind = Kind(path.split("/")[0], path in own, layered, transposed, cast, words)
            self.kinds[kind] += size
        # Towers with a backward pass, so that loops read their parameters twice.
        self.with_backward = {kind.tower for kind in self.kinds if kind.trained} | {"decoder"}
        self.layer = sum(
            n for k, n in self.kinds.items() if k.layered and any(w == "layers" for w, _ in k.words)
        ) / depth  # fmt: skip

    def states(self, mesh: MeshConfig, strategy: StrategyConfig) -> dict[str, float]:
        """Bytes by category: parameters, frozen ones and moments between steps; gradients;
        all-gathered parameters; transposed ones among these; layers of the larger stack that are
        cast.
        """
        key = mesh, *(getattr(strategy, name) for name in _STORED)
        if key not in self._states:
            self._states[key] = self._counted(mesh, strategy)
        return self._states[key]

    def _counted(self, mesh: MeshConfig, strategy: StrategyConfig) -> dict[str, float]:
        sizes: dict[str, float] = collections.defaultdict(float)
        for kind, size in self.kinds.items():
            split = kind.tower not in strategy.replicated
            stored = size / _parts(kind, mesh, strategy.params if split else ())
            updated = size / _parts(kind, mesh, strategy.optimizer)
            gathered = size / _parts(kind, mesh, strategy.all_gathered if split else ())
            sizes["parameters" if kind.trained else "frozen"] += stored
            if kind.trained:
                sizes["gradients"] += updated
                sizes["moments"] += 0.0 if "optimizer" in strategy.offload else 2 * updated
                sizes["replicated"] += stored if stored > updated else 0.0
            sizes["all_gathered"] += gathered if gathered != stored else 0.0
            if kind.transposed and split and stored < size / _parts(kind, mesh, ()):
                has_backward = kind.tower in self.with_backward
                sizes["transposed" if has_backward else "transposed once"] += stored
            if kind.layered and kind.cast:
                sizes["layers"] += gathered
        return sizes

    def work(self, step: QuickStep) -> float:
        """Approximate bytes that a step needs in addition."""
        mesh = step.mesh
        rows = step.rows / math.prod(getattr(mesh, axis) for axis in BATCH_AXES)
        if not step.pairs:
            assert isinstance(self.config, ModelConfig), "a dual encoder is trained on pairs"
            own = BatchShape(self.length, patches=self.patches)
            return self._rows(step, self.config, rows / step.microbatches, own)
        each, embeddings = [], 0.0
        for side in step.pairs.sides(int(rows)):
            own = side.rows._replace(patches=self._patches(side.rows))
            count = side.number / side.parts
            if isinstance(self.config, DualConfig):
                each.append(self._encoders(step, self.config, count, own))
            else:
                each.append(self._rows(step, self.config, count, own, logits=False))
            embeddings += 12.0 * side.number * step.pairs.width(self.config)
        together = sum(each) - (len(each) - 1) * self._weights(step)
        return embeddings + (together if step.microbatches == 1 else max(each))

    def _rows(
        self,
        step: QuickStep,
        config: ModelConfig,
        rows: float | int,
        row: BatchShape,
        logits: bool = True,
    ) -> float:
        """Bytes for the sequences of a vision-language model's microbatch."""
        mesh, decoder = step.mesh, config.decoder
        tokens = rows * row.length / mesh.context
        in_flight = 1 if mesh.pipeline == 1 else min(mesh.pipeline, step.microbatches)
        heads = decoder.num_heads * decoder.head_dim / mesh.tensor
        kv = 2 * decoder.num_kv_heads * decoder.head_dim / mesh.tensor
        mlp = 0.0 if decoder.num_experts else decoder.mlp_dim / mesh.tensor
        scores = self._scores(row.length, decoder.num_heads / mesh.tensor)
        saved = self._saved(step.remat, decoder.width, heads, kv, 2 * mlp, scores)
        saved_by_experts, inside = self._experts(step, decoder)
        total = tokens * (saved + saved_by_experts) * decoder.depth / mesh.pipeline * in_flight
        images, tower = self._vision(step, rows, row.patches) if row.patches else (0.0, 0.0)
        block = self._saved("none", decoder.width, heads, kv, 2 * mlp, self._worked(scores))
        head = 12 * min(decoder.vocab_size, 65_536) / mesh.tensor * decoder.head * logits
        # Attention's scores are freed when experts run.
        mixture = self._saved("none", decoder.width, heads, kv, 2 * mlp, 0.0) + inside
        # The towers reach their peaks one after the other.
        own = tokens * max(block, mixture, head) + self._weights(step)
        return total + images + max(own, tower)

    def _scores(self, keys: float | int, heads: float | int) -> float:
        """Numbers per query that attention keeps of its products with keys."""
        return 3.0 * keys * heads * stores_scores(self.config.attention, self.platform)

    def _worked(self, scores: float | int) -> float:
        """Scores alive in a block's backward pass, and their float32 gradient where it is
        separate.
        """
        return float(scores * (1 + COMPILERS[self.platform].separate_softmax_gradient))

    def _weights(self, step: QuickStep) -> float:
        """Bytes of a layer's all-gathered parameters and of their gradient."""
        return 1.5 * self.layer / step.mesh.tensor / step.mesh.expert

    def _experts(self, step: QuickStep, decoder: DecoderConfig) -> tuple[float, float]:
        """Bytes per token that a mixture of experts saves in a block, and that are alive at its
        peak.
        """
        if not decoder.num_experts:
            return 0.0, 0.0
        mesh, width, mlp = step.mesh, decoder.width, decoder.mlp_dim / step.mesh.tensor
        # Devices that share experts receive the tokens of all of them.
        copies = float(self.number * decoder.experts_per_token * mesh.expert)
        kernel = kernel_of(decoder.expert_matmul, self.platform) == "gpu"
        if mesh.expert > 1:
            mixture = _SHARED if kernel else _MASKED
            saved, inside = mixture.kept * width, mixture.inside * width
        else:
            saved = _ALONE.kept * (width + mlp)
            by_expert = 0 if kernel or self.platform == "tpu" else decoder.num_experts
            inside = _ALONE.inside * (width + mlp) * by_expert
        return copies * saved * (step.remat == "none"), copies * inside

    def _encoders(
        self, step: QuickStep, config: DualConfig, rows: float | int, row: BatchShape
    ) -> float:
        """Bytes for the sequences of a dual encoder's GradCache mini-batch."""
        total = sum(self._vision(step, rows, row.patches)) if row.patches else 0.0
        total += self._weights(step)
        if "text" in config.towers and row.length:
            t, tensor = config.text, step.mesh.tensor
            scores = self._scores(row.length, t.num_heads / tensor)
            dims = (t.width, t.width / tensor, 2 * t.width / tensor, t.mlp_dim / tensor, scores)
            saved = self._saved(step.remat, *dims) * t.depth * ("text" in self.trained)
            work = self._saved("none", *dims[:-1], self._worked(scores))
            total += rows * row.length * (saved + work)
        return total

    def _vision(
        self, step: QuickStep, rows: float | int, patches: float | int
    ) -> tuple[float, float]:
        """Bytes of the vision tower: saved for its backward pass, and alive at a block's peak."""
        mesh, vision = step.mesh, self.config.vision
        every, w = rows * patches / mesh.pipeline, vision.width
        keys = patches if vision.packed else self._image()  # windows are masks over the sequence
        learns = bool(self.trained & {"vision", "vision_top"})
        scores = self._scores(keys, vision.num_heads / mesh.tensor)
        mlp = vision.mlp_dim * (1 + vision.gated) / mesh.tensor
        remat = step.vision or step.remat
        saved = self._saved(remat, w, w / mesh.tensor, 2 * w / mesh.tensor, mlp, scores)
        total = every * saved * (max(feature_blocks(vision)) - vision.frozen_blocks) * learns
        return total, every * self._saved("none", w, w, 2 * w, mlp, self._worked(scores))

    def _patches(self, rows: BatchShape) -> int:
        """Patches of all images of a sequence."""
        return rows.patches if self.config.vision.packed else rows.images * self._image()

    def total(self, step: QuickStep, factor: float = 1.0, more: float = 0.0) -> float:
        """All bytes: states, gradients, all-gathered parameters and the step's work.

        Args:
            step: of a candidate.
            factor: correction of the work, learned from traces.
            more: bytes to add to the work.
        """
        sizes = self.states(step.mesh, step.strategy)
        between = sizes["parameters"] + sizes["frozen"] + sizes["moments"]
        between += shared_memory.copies(step.outer) * sizes["parameters"]
        compiler, parts = COMPILERS[self.platform], step.microbatches > 1
        # A microbatch's gradients, in addition to their sum.
        gradients = 1 + 2 * compiler.runs_when_ready + parts
        work = factor * self.work(step) + more + gradients * sizes["gradients"]
        if compiler.transposes_gathered:
            work += sizes["transposed"] + sizes["transposed once"] * parts
        if self.platform == "tpu" and self.number < 4:  # copies of all layers, before the loop
            work += sizes["layers"] * self.number / 4
        share = compiler.gathered_gradients
        after_update = share * sizes["gradients"] + sizes["replicated"] if share else 0.0
        return between + max(work, after_update) + sizes["all_gathered"]

    def _saved(
        self,
        remat: str,
        width: float | int,
        q: float | int,
        kv: float | int,
        mlp: float | int,
        scores: float | int,
    ) -> float:
        """Bytes per token that a block saves on the device for its backward pass."""
        numbers = {
            "offload": 0.0,
            "full": float(width),
            # A mixture (mlp=0) saves neither the matmuls' results nor their sum; a kernel's output
            # is saved.
            "dots": (3.0 * width + 2 * q + kv + mlp if mlp else 2.0 * width + q + kv)
            + q * (scores == 0),
            "none": 8.0 * width + 4 * q + 3 * kv + 3 * mlp + scores,
        }
        return self.number * numbers[remat]

    def _image(self) -> int:
        """Patches of an image."""
        vision = self.config.vision
        return (vision.image_size // vision.patch_size) ** 2


def _parts(kind: Kind, mesh: MeshConfig, over: tuple[str, ...]) -> float:
    """Number of shards of a parameter; see ``parallel.rules.PARAMETERS``."""
    parts = 1.0
    for word, size in kind.words:
        if word == "embed":
            parts *= math.prod(getattr(mesh, axis) for axis in over)
        elif word == "experts":
            parts *= mesh.expert
        elif word == "layers":
            parts *= mesh.pipeline if kind.layered else 1
        elif word == "vocab":
            own = mesh.tensor * mesh.pipeline
            parts *= own if size % own == 0 else mesh.tensor
        elif word == "kv_heads":
            parts *= mesh.tensor if size % mesh.tensor == 0 else 1
        else:
            parts *= mesh.tensor
    return parts


def _stack(config: ModelConfig | DualConfig) -> tuple[str, int]:
    """The tower with the larger layers, and its number of layers."""
    if isinstance(config, ModelConfig):
        return "decoder", max(1, config.decoder.depth)
    wide = max(config.towers, key=lambda tower: getattr(config, tower).width)
    return wide, max(1, getattr(config, wide).depth)


@per_object
def _dims(model: Any) -> list[tuple[str, str, int]]:
    """(tower, logical axis, size) of a model's dims, each once."""
    found = dict.fromkeys(
        (path.split("/")[0], word, size)
        for path, x in model.shapes.items()
        for word, size in zip(model.logical[path], x.shape)
    )
    return list(found)


def refused(model: Any, mesh: MeshConfig, over: tuple[str, ...]) -> str:
    """Why a mesh does not divide a model's dims; "" if it does.

    Args:
        model: on one device.
        mesh: resolved.
        over: batch axes that shard its wide dims.
    """
    wide = math.prod(getattr(mesh, axis) for axis in over)
    axes = {"embed": wide, "experts": mesh.expert, "heads": mesh.tensor, "mlp": mesh.tensor}
    axes["vocab"] = mesh.tensor
    for tower, word, size in _dims(model):
        parts = axes.get(word, 1)
        if size % parts:
            near = math.gcd(size, parts)
            return f"{tower}'s {word}={size} by {parts}; use {near}"
    if mesh.pipeline > 1 and isinstance(model.config, DualConfig):
        return f"no decoder to divide into {mesh.pipeline} pipeline stages"
    if mesh.pipeline > 1 and model.config.decoder.depth % mesh.pipeline:
        return f"{model.config.decoder.depth} layers by {mesh.pipeline} pipeline stages"
    return ""
