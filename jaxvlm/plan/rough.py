"""A device's memory in microseconds, to tell which ways to train are worth a trace.

Between steps it is what :func:`jaxvlm.plan.memory.states` says: parameters of one kind (the same
words on their dims) are counted together. What a step needs besides is a formula of each block's
dims, which the traces of those ways that were looked at closely correct.
"""

from __future__ import annotations

import collections
import math
from typing import Any, NamedTuple

import numpy as np

from jaxvlm.build.assemble import split
from jaxvlm.build.model import Model
from jaxvlm.config import (
    DecoderConfig,
    DualConfig,
    MeshConfig,
    ModelConfig,
    StrategyConfig,
    feature_blocks,
)
from jaxvlm.models.vlm import DTYPES
from jaxvlm.nn.grouped import has_kernel
from jaxvlm.parallel.mesh import BATCH_AXES
from jaxvlm.plan.absent import Rows
from jaxvlm.plan.compilers import COMPILERS
from jaxvlm.plan.pairs import Pairing

_TENSOR = ("heads", "kv_heads", "mlp", "vocab")
_STORED = ("params", "gathered", "optimizer", "offload", "whole")
"""Fields of a strategy that say where states lie."""


class _Mixture(NamedTuple):
    """Numbers of a mixture of experts, for each one in its tokens' copies; traces have about as
    many (Qwen3-VL's two mixtures; rows of 2,048 and 4,096 tokens)."""

    kept: float
    """Of a block, for its backward pass, without remat."""
    inside: float
    """At its worst moment."""


_MASKED = _Mixture(7.5, 18.5)
"""Experts over an axis: of their copies of all tokens, a model's width each."""
_SHARED = _Mixture(4.7, 9.0)
"""Likewise where a kernel leaves out rows that are not the device's: nothing is masked."""
_ALONE = _Mixture(4.0, 3.0)
"""All experts on each device: of widths and hidden widths; ``inside`` for each expert, where a
grouped matmul takes its rows once for each (see ``compilers.COMPILERS``)."""


class Kind(NamedTuple):
    """Parameters that every mesh splits alike."""

    tower: str
    trained: bool
    layered: bool
    """Of the decoder's stack, which stages cut."""
    turned: bool
    """Loops gather a dim of it that is not a layer's first; see ``compilers.COMPILERS``."""
    words: tuple[tuple[str, int], ...]
    """Words of their dims that a mesh may split, and the dims' sizes."""


class Step(NamedTuple):
    """What of a way to train memory depends on."""

    mesh: MeshConfig
    strategy: StrategyConfig
    remat: str
    microbatches: int
    rows: int
    """Of a batch, over all devices."""
    vision: str = ""
    """Remat of the vision tower, where it is another."""
    pairs: Pairing | None = None
    """With its chunks, where these are trained on."""


class Rough:
    """Bytes of a device for a model and what is trained of it.

    Args:
        model: on one device.
        frozen: path patterns.
        length: tokens of a row.
        patches: of a row, of all its pictures.
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
            turned = model.logical[path][:1] == ("layers",) and "embed" in model.logical[path][2:]
            self.kinds[Kind(path.split("/")[0], path in own, layered, turned, words)] += size
        # Towers that a gradient passes, so that loops read them twice.
        self.passed = {kind.tower for kind in self.kinds if kind.trained} | {"decoder"}
        self.layer = sum(
            n for k, n in self.kinds.items() if k.layered and any(w == "layers" for w, _ in k.words)
        ) / depth  # fmt: skip

    def states(self, mesh: MeshConfig, strategy: StrategyConfig) -> dict[str, float]:
        """Parameters, frozen ones and moments between steps; gradients; what is gathered; of these,
        what loops turn; the larger stack's layers.
        """
        key = mesh, *(getattr(strategy, name) for name in _STORED)
        if key not in self._states:
            self._states[key] = self._counted(mesh, strategy)
        return self._states[key]

    def _counted(self, mesh: MeshConfig, strategy: StrategyConfig) -> dict[str, float]:
        found: dict[str, float] = collections.defaultdict(float)
        for kind, size in self.kinds.items():
            split = kind.tower not in strategy.whole
            stored = size / _parts(kind, mesh, strategy.params if split else ())
            held = size / _parts(kind, mesh, strategy.optimizer)
            gathered = size / _parts(kind, mesh, strategy.gathered if split else ())
            found["parameters" if kind.trained else "frozen"] += stored
            if kind.trained:
                found["gradients"] += held
                found["moments"] += 0.0 if "optimizer" in strategy.offload else 2 * held
                found["whole"] += stored if stored > held else 0.0
            found["gathered"] += gathered if gathered != stored else 0.0
            if kind.turned and split and stored < size / _parts(kind, mesh, ()):
                found["turned" if kind.tower in self.passed else "turned, once"] += stored
            if kind.layered:
                found["layers"] += gathered
        return found

    def work(self, step: Step) -> float:
        """What a step needs besides, about."""
        mesh = step.mesh
        rows = step.rows / math.prod(getattr(mesh, axis) for axis in BATCH_AXES)
        if not step.pairs:
            assert isinstance(self.config, ModelConfig), "a dual encoder is trained on pairs"
            own = Rows(self.length, patches=self.patches)
            return self._rows(step, self.config, rows / step.microbatches, own)
        each, vectors = [], 0.0
        for side in step.pairs.sides(int(rows)):
            own = side.rows._replace(patches=self._patches(side.rows))
            count = side.number / side.parts
            if isinstance(self.config, DualConfig):
                each.append(self._encoders(step, self.config, count, own))
            else:
                each.append(self._rows(step, self.config, count, own, logits=False))
            vectors += 12.0 * side.number * step.pairs.width(self.config)
        at_once = sum(each) - (len(each) - 1) * self._weights(step)
        return vectors + (at_once if step.microbatches == 1 else max(each))

    def _rows(
        self, step: Step, config: ModelConfig, rows: float | int, row: Rows, logits: bool = True
    ) -> float:
        """Of rows that a vision-language model goes through at once."""
        mesh, decoder = step.mesh, config.decoder
        tokens = rows * row.length / mesh.context
        in_flight = 1 if mesh.stage == 1 else min(mesh.stage, step.microbatches)
        heads = decoder.num_heads * decoder.head_dim / mesh.tensor
        more = 2 * decoder.num_kv_heads * decoder.head_dim / mesh.tensor
        mlp = 0.0 if decoder.num_experts else decoder.mlp_dim / mesh.tensor
        seen = row.length if self.platform != "tpu" else 0
        scores = 3 * seen * decoder.num_heads / mesh.tensor
        saved = self._saved(step.remat, decoder.width, heads, more, 2 * mlp, scores)
        kept, inside = self._experts(step, decoder)
        total = tokens * (saved + kept) * decoder.depth / mesh.stage * in_flight
        pictures, tower = self._vision(step, rows, row.patches) if row.patches else (0.0, 0.0)
        block = self._saved("none", decoder.width, heads, more, 2 * mlp, self._worked(scores))
        head = 12 * min(decoder.vocab_size, 65_536) / mesh.tensor * decoder.head * logits
        # Attention's scores are gone when experts work.
        mixture = self._saved("none", decoder.width, heads, more, 2 * mlp, 0.0) + inside
        # The towers are at their worst one behind the other.
        own = tokens * max(block, mixture, head) + self._weights(step)
        return total + pictures + max(own, tower)

    def _worked(self, scores: float | int) -> float:
        """Of what is kept of scores, what a block's backward pass has: scores and their gradient in
        float32, where these are apart.
        """
        return float(scores * (1 + COMPILERS[self.platform].apart))

    def _weights(self, step: Step) -> float:
        """Of a layer, gathered, and of its gradient."""
        return 1.5 * self.layer / step.mesh.tensor / step.mesh.expert

    def _experts(self, step: Step, decoder: DecoderConfig) -> tuple[float, float]:
        """Bytes a token of what a mixture keeps of a block, and of what it works with."""
        if not decoder.num_experts:
            return 0.0, 0.0
        mesh, width, mlp = step.mesh, decoder.width, decoder.mlp_dim / step.mesh.tensor
        # Devices that share experts have all of their tokens.
        copies = float(self.number * decoder.experts_per_token * mesh.expert)
        kernel = has_kernel(decoder.expert_matmul, self.platform)
        if mesh.expert > 1:
            mixture = _SHARED if kernel else _MASKED
            kept, inside = mixture.kept * width, mixture.inside * width
        else:
            kept = _ALONE.kept * (width + mlp)
            by_expert = 0 if kernel or self.platform == "tpu" else decoder.num_experts
            inside = _ALONE.inside * (width + mlp) * by_expert
        return copies * kept * (step.remat == "none"), copies * inside

    def _encoders(self, step: Step, config: DualConfig, rows: float | int, row: Rows) -> float:
        """Likewise, of a dual encoder."""
        total = sum(self._vision(step, rows, row.patches)) if row.patches else 0.0
        total += self._weights(step)
        if "text" in config.towers and row.length:
            t, tensor = config.text, step.mesh.tensor
            scores = 3 * row.length * t.num_heads / tensor * (self.platform != "tpu")
            dims = (t.width, t.width / tensor, 2 * t.width / tensor, t.mlp_dim / tensor, scores)
            kept = self._saved(step.remat, *dims) * t.depth * ("text" in self.trained)
            work = self._saved("none", *dims[:-1], self._worked(scores))
            total += rows * row.length * (kept + work)
        return total

    def _vision(self, step: Step, rows: float | int, patches: float | int) -> tuple[float, float]:
        """Of the vision tower: what it keeps, and what it works with."""
        mesh, vision = step.mesh, self.config.vision
        every, w = rows * patches / mesh.stage, vision.width
        keys = patches if vision.packed else self._picture()  # windows are masks of a row's
        learns = bool(self.trained & {"vision", "top"})
        scores = 3 * keys * vision.num_heads / mesh.tensor * (self.platform != "tpu")
        mlp = vision.mlp_dim * (1 + vision.gated) / mesh.tensor
        remat = step.vision or step.remat
        kept = self._saved(remat, w, w / mesh.tensor, 2 * w / mesh.tensor, mlp, scores)
        total = every * kept * (max(feature_blocks(vision)) - vision.trunk) * learns
        return total, every * self._saved("none", w, w, 2 * w, mlp, self._worked(scores))

    def _patches(self, rows: Rows) -> int:
        """Of all pictures of a row."""
        return rows.patches if self.config.vision.packed else rows.pictures * self._picture()

    def total(self, step: Step, factor: float = 1.0, more: float = 0.0) -> float:
        """All of it: states, gradients, weights that are gathered, and the work.

        Args:
            step: of a way.
            factor: of the work, by what traces said.
            more: bytes of it besides.
        """
        found = self.states(step.mesh, step.strategy)
        between = found["parameters"] + found["frozen"] + found["moments"]
        compiler, parts = COMPILERS[self.platform], step.microbatches > 1
        # Of microbatches, beside their sum.
        gradients = 1 + 2 * compiler.copied + parts
        work = factor * self.work(step) + more + gradients * found["gradients"]
        if compiler.turns:
            work += found["turned"] + found["turned, once"] * parts
        if self.platform == "tpu" and self.number < 4:  # copies of all layers', before their loop
            work += found["layers"] * self.number / 4
        share = compiler.gathers
        behind = share * found["gradients"] + found["whole"] if share else 0.0
        return between + max(work, behind) + found["gathered"]

    def _saved(
        self,
        remat: str,
        width: float | int,
        q: float | int,
        kv: float | int,
        mlp: float | int,
        scores: float | int,
    ) -> float:
        """Bytes a token of what a block keeps on the device for its backward pass."""
        numbers = {
            "offload": 0.0,
            "full": float(width),
            # Of a mixture (mlp=0) neither products nor their sum is kept.
            "dots": 3.0 * width + 2 * q + kv + mlp if mlp else 2.0 * width + q + kv,
            "none": 8.0 * width + 4 * q + 3 * kv + 3 * mlp + scores,
        }
        return self.number * numbers[remat]

    def _picture(self) -> int:
        """Patches of a picture."""
        vision = self.config.vision
        return (vision.image_size // vision.patch_size) ** 2


def _parts(kind: Kind, mesh: MeshConfig, over: tuple[str, ...]) -> float:
    """Devices that a parameter is split over; see ``parallel.rules.PARAMETERS``."""
    parts = 1.0
    for word, size in kind.words:
        if word == "embed":
            parts *= math.prod(getattr(mesh, axis) for axis in over)
        elif word == "experts":
            parts *= mesh.expert
        elif word == "layers":
            parts *= mesh.stage if kind.layered else 1
        elif word == "vocab":
            own = mesh.tensor * mesh.stage
            parts *= own if size % own == 0 else mesh.tensor
        elif word == "kv_heads":
            parts *= mesh.tensor if size % mesh.tensor == 0 else 1
        else:
            parts *= mesh.tensor
    return parts


def _stack(config: ModelConfig | DualConfig) -> tuple[str, int]:
    """The tower with the larger layers, and how many there are."""
    if isinstance(config, ModelConfig):
        return "decoder", max(1, config.decoder.depth)
    wide = max(config.towers, key=lambda tower: getattr(config, tower).width)
    return wide, max(1, getattr(config, wide).depth)


def refused(model: Any, mesh: MeshConfig, over: tuple[str, ...]) -> str:
    """Why a mesh does not fit a model's dims; "" where it does.

    Args:
        model: on one device.
        mesh: resolved.
        over: batch axes that its wide dims are split over.
    """
    wide = math.prod(getattr(mesh, axis) for axis in over)
    axes = {"embed": wide, "experts": mesh.expert, "heads": mesh.tensor, "mlp": mesh.tensor}
    axes["vocab"] = mesh.tensor
    for path, x in model.shapes.items():
        for word, size in zip(model.logical[path], x.shape):
            parts = axes.get(word, 1)
            if size % parts:
                near = math.gcd(size, parts)
                return f"{path.split('/')[0]}'s {word}={size} by {parts}; {near} would do"
    if mesh.stage > 1 and isinstance(model.config, DualConfig):
        return f"no decoder to cut by {mesh.stage} stages"
    if mesh.stage > 1 and model.config.decoder.depth % mesh.stage:
        return f"{model.config.decoder.depth} layers by {mesh.stage} stages"
    return ""
