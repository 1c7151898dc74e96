"""Which mesh axis each logical axis lies on."""

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
from jaxvlm.parallel.mesh import BATCH_AXES
from jaxvlm.types import Logical

_LOG = logging.getLogger(__name__)

Place = str | tuple[str, ...] | None

PARAMETERS: dict[str, Place] = {
    "layers": None,
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "mlp": "tensor",
    "vocab": ("tensor", "stage"),
    "experts": "expert",
    "norm": None,  # vectors of a norm or an output bias: too small to be worth a gather
    "patch": None,  # pixels of a patch, or of a convolution's window
    "position": None,
    "rank": None,  # of a low-rank adapter
}
"""Parameters: Megatron pairs over ``tensor``, everything wide over ``fsdp``."""

ACTIVATIONS: dict[str, Place] = {
    "batch": BATCH_AXES,
    "seq": "context",
    "stream": "context",  # as seq, between blocks
    "row": None,  # a whole row of tokens
    "embed": None,
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "mlp": "tensor",
    "vocab": ("tensor", "stage"),
    "experts": "expert",
}
"""Activations: rows over the data axes, their tokens over ``context``, heads and MLP width over
``tensor``."""
WHOLE_ROWS: dict[str, Place] = {
    **ACTIVATIONS,
    "seq": None,
    "stream": None,
    "heads": ("context", "tensor"),
    "kv_heads": ("context", "tensor"),
}
"""Inside of Ulysses' attention (arXiv 2309.14509): rows are whole, and heads are split more."""
PICTURES: dict[str, Place] = {
    **ACTIVATIONS,
    "batch": (*BATCH_AXES, "context", "stage"),
    "seq": None,
    "stream": None,
}
"""Of a tower that takes pictures one by one: they are dealt over ``context`` and ``stage`` too."""
PACKED: dict[str, Place] = {**ACTIVATIONS, "batch": (*BATCH_AXES, "stage")}
"""Of a tower that takes rows of packed patches: rows are dealt over ``stage`` too."""


_LEFT_OUT = {
    "batch": ("stage", "context"),
    "seq": ("context",),
    "stream": ("tensor", "context"),
    "kv_heads": ("tensor",),
    "vocab": ("stage",),
}
"""Word -> the mesh axes that a dim need not be a multiple of, those to be left out first first."""


def split_over(axes: tuple[str, ...], cut: bool = False) -> tuple[tuple[str, Place], ...]:
    """:data:`PARAMETERS` with wide dims split over ``axes`` of the batch instead of ``fsdp``.

    Args:
        axes: of the mesh.
        cut: whether the tower's layers are a pipeline's.
    """
    own: dict[str, Place] = {"embed": axes or None, "layers": "stage" if cut else None}
    return tuple({**PARAMETERS, **own}.items())


_QUIET = contextvars.ContextVar("quiet", default=False)


def say_once(line: str) -> None:
    """Log what holds for the whole run, however often it is traced."""
    if not _QUIET.get():
        _say(line)


@functools.cache
def _say(line: str) -> None:
    _LOG.info("%s", line)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Within it nothing is said: of a trace that is not run."""
    before = _QUIET.set(True)
    try:
        yield
    finally:
        _QUIET.reset(before)


@dataclasses.dataclass(frozen=True)
class Axes:
    """A mesh and the rules of one tower, kept by each module. Static and hashable."""

    mesh: jax.sharding.Mesh
    parameters: tuple[tuple[str, Place], ...] = tuple(PARAMETERS.items())
    activations: tuple[tuple[str, Place], ...] = tuple(ACTIVATIONS.items())
    context: str = "gather"
    """How split rows attend; see :class:`jaxvlm.config.StrategyConfig`."""

    @property
    def platform(self) -> str:
        """``cpu``, ``gpu`` or ``tpu``: where this tower runs."""
        return self.mesh.devices.flat[0].platform

    def parameter(self, name: str, logical: Logical, shape: tuple[int, ...]) -> NamedSharding:
        """The sharding of parameter ``name``; key heads fewer than ``tensor`` are whole.

        Raises:
            ConfigError: a word without a rule, two dims on one mesh axis, or a dim that its
                mesh axes do not divide.
        """
        rules = dict(self.parameters)
        return self._sharding(name, logical, shape, self._fitting(rules, logical, shape))

    def activation(self, logical: Logical, shape: tuple[int, ...]) -> NamedSharding:
        """The sharding of an activation; raises like :meth:`parameter`.

        Tokens that ``context`` or ``tensor`` does not divide (a class token's row, one new token)
        are not split over it.
        """
        rules = dict(self.activations)
        return self._sharding("an activation", logical, shape, self._fitting(rules, logical, shape))

    def _fitting(
        self, rules: dict[str, Place], logical: Logical, shape: tuple[int, ...]
    ) -> dict[str, Place]:
        """``rules`` without the axes of :data:`_LEFT_OUT` that do not divide a dim."""
        for word, size in zip(logical, shape):
            for axis in _LEFT_OUT.get(word, ()):
                axes = _as_tuple(rules.get(word))
                if axis in axes and size % math.prod(map(self._size, axes)):
                    if size > 1 and self._size(axis) > 1:
                        say_once(f"{word!r} of {size}: whole on each device of {axis!r}")
                    rules[word] = tuple(a for a in axes if a != axis) or None
        return rules

    def splits_rows(self, length: int) -> bool:
        """Whether a row of so many tokens is split over ``context``."""
        parts = self.mesh.shape["context"]
        return parts > 1 and dict(self.activations)["seq"] == "context" and length % parts == 0

    def mesh_axes(self, word: str) -> tuple[str, ...]:
        """The mesh axes that an activation's ``word`` is split over."""
        return tuple(a for a in _as_tuple(dict(self.activations)[word]) if self._size(a) > 1)

    def _size(self, axis: str) -> int:
        """Devices that the compiler may split over: one where a ``shard_map`` around has them."""
        return 1 if axis in jax.sharding.get_abstract_mesh().manual_axes else self.mesh.shape[axis]

    def _sharding(
        self, name: str, logical: Logical, shape: tuple[int, ...], rules: Mapping[str, Place]
    ) -> NamedSharding:
        if len(logical) != len(shape):
            raise ConfigError(
                f"{name}: {len(shape)} dims {shape} but {len(logical)} words {logical}"
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
                    f"{name}: {word}={size} is not divisible by the {parts} devices of mesh "
                    f"axis {'×'.join(axes)}; {near} would do; change config.mesh or the model's "
                    f"{word}"
                )
            split = tuple(a for a in axes if self._size(a) > 1)
            places.append(split if len(split) > 1 else next(iter(split), None))
        around = jax.sharding.get_abstract_mesh()  # says which axes a shard_map around has
        return NamedSharding(self.mesh if around.empty else around, PartitionSpec(*places))


def shard(axes: Axes, x: jax.Array, *logical: str) -> jax.Array:
    """``x``, its layout pinned by the meaning of its dims.

    Args:
        axes: the tower's mesh and rules.
        x: an activation, any dtype.
        *logical: one word a dim of ``x``.
    """
    if axes.mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, axes.activation(logical, x.shape))


def _as_tuple(place: Place) -> tuple[str, ...]:
    if place is None:
        return ()
    return (place,) if isinstance(place, str) else place
