"""Sharding rules: which mesh axes each logical axis of a parameter or activation is split over."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import logging
import math
from collections.abc import Iterator, Mapping

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxvlm.config import ConfigError
from jaxvlm.parallel.mesh import BATCH_AXES, mesh_here
from jaxvlm.types import Logical

_LOG = logging.getLogger(__name__)

Place = str | tuple[str, ...] | None
VOCABULARY_AXES = ("tensor", "pipeline")
"""Axes that split the vocabulary."""

PARAMETERS: dict[str, Place] = {
    "layers": None,
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "mlp": "tensor",
    "vocab": VOCABULARY_AXES,
    "experts": "expert",
    "norm": None,  # scales of a norm or an output bias: too small to be worth an all-gather
    "patch": None,  # pixels of a patch, or of a convolution's window
    "position": None,
    "rank": None,  # the rank of a low-rank adapter
}
"""Rules for parameters: Megatron's column- and row-parallel pairs over ``tensor``, model width
over ``fsdp``."""

ACTIVATIONS: dict[str, Place] = {
    "batch": BATCH_AXES,
    "seq": "context",
    "stream": "context",  # the sequence dim of the residual stream, between blocks
    "row": None,  # the sequence dim where all of a sequence's tokens are needed
    "embed": None,
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "mlp": "tensor",
    "vocab": VOCABULARY_AXES,
    "experts": "expert",
}
"""Rules for activations: the batch over the batch axes, tokens of a sequence over ``context``,
heads and MLP width over ``tensor``."""
WHOLE_ROWS: dict[str, Place] = {
    **ACTIVATIONS,
    "seq": None,
    "stream": None,
    "heads": ("context", "tensor"),
    "kv_heads": ("context", "tensor"),
}
"""Rules inside of Ulysses attention (arXiv 2309.14509): sequences are not split; heads are split
over ``context`` too."""
IMAGES: dict[str, Place] = {
    **ACTIVATIONS,
    "batch": (*BATCH_AXES, "context", "pipeline"),
    "seq": None,
    "stream": None,
}
"""Rules of a vision encoder that takes images one by one: images are split over ``context`` and
``pipeline`` too."""
PACKED: dict[str, Place] = {**ACTIVATIONS, "batch": (*BATCH_AXES, "pipeline")}
"""Rules of a vision encoder that takes sequences of packed patches: sequences are split over
``pipeline`` too."""


_LEFT_OUT = {
    "batch": ("pipeline", "context"),
    "seq": ("context",),
    "stream": ("tensor", "context"),
    "kv_heads": ("tensor",),
    "vocab": ("pipeline",),
}
"""Logical axis -> mesh axes that are left out, in this order, where they do not divide the dim."""


def split_over(axes: tuple[str, ...], cut: bool = False) -> tuple[tuple[str, Place], ...]:
    """Return :data:`PARAMETERS` with model width split over ``axes`` instead of ``fsdp``.

    Args:
        axes: batch axes of the mesh.
        cut: whether the submodel's layers are split over the stages of a pipeline.
    """
    own: dict[str, Place] = {"embed": axes or None, "layers": "pipeline" if cut else None}
    return tuple({**PARAMETERS, **own}.items())


_QUIET = contextvars.ContextVar("quiet", default=False)


def log_once(line: str) -> None:
    """Log a line once per process, however often the code that logs it is traced."""
    if not _QUIET.get():
        _logged(line)


@functools.cache
def _logged(line: str) -> None:
    _LOG.info("%s", line)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Context manager that silences :func:`log_once`, for traces that are never run."""
    before = _QUIET.set(True)
    try:
        yield
    finally:
        _QUIET.reset(before)


@dataclasses.dataclass(frozen=True)
class Axes:
    """A mesh and the sharding rules of one submodel, held by each module. Static and hashable."""

    mesh: jax.sharding.Mesh
    parameters: tuple[tuple[str, Place], ...] = tuple(PARAMETERS.items())
    activations: tuple[tuple[str, Place], ...] = tuple(ACTIVATIONS.items())
    context: str = "gather"
    """Attention over split sequences; see :class:`jaxvlm.config.StrategyConfig`."""

    @property
    def platform(self) -> str:
        """The platform that this submodel runs on: ``cpu``, ``gpu`` or ``tpu``."""
        return self.mesh.devices.flat[0].platform

    def parameter(self, name: str, logical: Logical, shape: tuple[int, ...]) -> NamedSharding:
        """Return the sharding of parameter ``name``.

        Key/value heads are replicated where there are fewer of them than ``tensor``.

        Raises:
            ConfigError: a logical axis without a rule, two dims on one mesh axis, or a dim that
                its mesh axes do not divide.
        """
        rules = dict(self.parameters)
        return self._sharding(name, logical, shape, self._fitting(rules, logical, shape))

    def activation(self, logical: Logical, shape: tuple[int, ...]) -> NamedSharding:
        """Return the sharding of an activation; raises like :meth:`parameter`.

        A sequence dim that ``context`` or ``tensor`` does not divide (patches and a class token,
        a single decoded token) is not split over that axis.
        """
        rules = dict(self.activations)
        return self._sharding("an activation", logical, shape, self._fitting(rules, logical, shape))

    def _fitting(
        self, rules: dict[str, Place], logical: Logical, shape: tuple[int, ...]
    ) -> dict[str, Place]:
        """Drop from ``rules`` the axes of :data:`_LEFT_OUT` that do not divide a dim."""
        for word, size in zip(logical, shape):
            for axis in _LEFT_OUT.get(word, ()):
                axes = _as_tuple(rules.get(word))
                if axis in axes and size % math.prod(map(self._size, axes)):
                    if size > 1 and self._size(axis) > 1:
                        log_once(f"{word!r} of {size}: replicated over mesh axis {axis!r}")
                    rules[word] = tuple(a for a in axes if a != axis) or None
        return rules

    def splits_rows(self, length: int) -> bool:
        """Whether a row of so many tokens is split over ``context``."""
        parts = self.mesh.shape["context"]
        return parts > 1 and dict(self.activations)["seq"] == "context" and length % parts == 0

    def mesh_axes(self, word: str) -> tuple[str, ...]:
        """Return the mesh axes that an activation's logical axis ``word`` is split over."""
        return tuple(a for a in _as_tuple(dict(self.activations)[word]) if self._size(a) > 1)

    def _size(self, axis: str) -> int:
        """Devices that the compiler may split over: 1 for manual axes of an outer ``shard_map``."""
        return 1 if axis in jax.sharding.get_abstract_mesh().manual_axes else self.mesh.shape[axis]

    def _sharding(
        self, name: str, logical: Logical, shape: tuple[int, ...], rules: Mapping[str, Place]
    ) -> NamedSharding:
        if len(logical) != len(shape):
            raise ConfigError(
                f"{name}: {len(shape)} dims {shape} but {len(logical)} logical axes {logical}"
            )
        used: dict[str, str] = {}
        places: list[Place] = []
        for word, size in zip(logical, shape):
            if word not in rules:
                raise ConfigError(f"{name}: no sharding rule for the logical axis {word!r}")
            axes = _as_tuple(rules[word])
            for axis in axes:
                if axis in used and self._size(axis) > 1:
                    raise ConfigError(
                        f"{name}: the rules put both {used[axis]!r} and {word!r} "
                        f"on the mesh axis {axis!r}"
                    )
                used[axis] = word
            parts = math.prod(map(self._size, axes))
            if size % parts:
                near = math.gcd(size, parts)
                raise ConfigError(
                    f"{name}: {word}={size} is not divisible by the {parts} devices of mesh axis "
                    f"{'×'.join(axes)}; {near} would do; change config.mesh or the model's {word}"
                )
            split = tuple(a for a in axes if self._size(a) > 1)
            places.append(split if len(split) > 1 else next(iter(split), None))
        return NamedSharding(mesh_here(self.mesh), PartitionSpec(*places))


def shard(axes: Axes, x: jax.Array, *logical: str) -> jax.Array:
    """Constrain the sharding of an activation by its logical axes.

    Args:
        axes: the submodel's mesh and rules.
        x: an activation, any dtype.
        *logical: one logical axis for each dim of ``x``.
    """
    if axes.mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, axes.activation(logical, x.shape))


def _as_tuple(place: Place) -> tuple[str, ...]:
    if place is None:
        return ()
    return (place,) if isinstance(place, str) else place
