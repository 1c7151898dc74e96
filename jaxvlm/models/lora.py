"""Low-rank adapters of frozen linear maps: LoRA (arXiv 2106.09685), DoRA (arXiv 2402.09353).

An adapter's parameters have paths below their map's in the flat dict: ``…/wq`` has ``…/wq/lora_a``,
``…/wq/lora_b`` and, with DoRA, ``…/wq/magnitude``. Layers do not know of them: :func:`attach`
replaces the map's array by an :class:`Adapted`.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxvlm.config import ConfigError, LoraConfig, check_choice
from jaxvlm.models.int8_weights import Dims
from jaxvlm.nn.dropout import check_rate, dropout, fold
from jaxvlm.nn.param import Weight, contract
from jaxvlm.types import Logical, Params

PARTS = A, B, MAGNITUDE = "lora_a", "lora_b", "magnitude"
ALL = "all-linear"
"""Target pattern that matches all linear maps."""
_WHERE = "config.model.lora"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapted(Weight):
    """The weight ``W + scale A B``; with a magnitude m (DoRA), each output column has L2 norm m.

    Activations go through A and B separately: the sum of matrices is never computed, and a frozen
    ``W`` costs no weight gradient.
    """

    w: Any
    """[*in, *out], or a :class:`~jaxvlm.nn.param.Weight`."""
    a: Any
    """[*in, r]."""
    b: Any
    """[r, *out]."""
    magnitude: Any
    """[*out], or ``None``."""
    dropout_keys: Any
    """u32[B, 2]: keys of the dropout of the adapter's input; ``None``: no dropout."""
    scale: float = dataclasses.field(metadata={"static": True})
    rate: float = dataclasses.field(metadata={"static": True})

    def contract(self, x: jax.Array, num_in: int, split: bool) -> jax.Array:
        """Compute ``[..., in] x [in, out] -> [..., out]``."""
        dropped = dropout(x, self.rate, self.dropout_keys)
        low = contract(contract(dropped, self.a, num_in, split), self.b, 1, split)
        y = contract(x, self.w, num_in, split)
        low = (self.scale * low).astype(x.dtype)
        y = y + low
        if self.magnitude is None:
            return y
        # A constant to the gradient, as in section 4.3 of DoRA's paper.
        length = jax.lax.stop_gradient(column_norms(self.w, self.a, self.b, self.scale))
        factor = (self.magnitude / length).astype(y.dtype)
        if self.dropout_keys is None:
            return y * factor
        # As in PEFT: the term that the magnitude adds reads the input after dropout too.
        return y + (contract(dropped, self.w, num_in, split) + low) * (factor - 1)

    def dense(self) -> jax.Array:
        """Merge the adapter into the weight: f32[*in, *out]."""
        y = _dense(self.w) + self.scale * jnp.tensordot(self.a, self.b, axes=1)
        if self.magnitude is None:
            return y
        return y * (self.magnitude / column_norms(self.w, self.a, self.b, self.scale))


def _dense(w: jax.Array | Weight) -> jax.Array:
    return w.dense() if isinstance(w, Weight) else w


def column_norms(w: jax.Array | Weight, a: jax.Array, b: jax.Array, scale: float) -> jax.Array:
    """Compute the L2 norm of each output column of ``w + scale a b``.

    ``|w|^2 + 2 s <w, ab> + s^2 |ab|^2`` with products of rank r: no matrix of ``w``'s size is
    allocated, unless ``w`` is int8.

    Args:
        w: [*in, *out].
        a: [*in, r].
        b: [r, *out].
        scale: s.

    Returns:
        f32[*out].
    """
    inner, out = math.prod(a.shape[:-1]), b.shape[1:]
    parts = (_dense(w), inner), (a, inner), (b, len(b))
    w, a, b = (x.astype(jnp.float32).reshape(rows, -1) for x, rows in parts)
    cross = jnp.sum(b * (a.T @ w), axis=0)
    low = jnp.sum(b * ((a.T @ a) @ b), axis=0)
    squares = jnp.sum(w * w, axis=0) + 2 * scale * cross + scale**2 * low
    return jnp.sqrt(jnp.maximum(squares, 0.0)).reshape(out)


def scale(config: LoraConfig) -> float:
    """Return the factor of ``A B``; with ``rslora`` rank-stabilized (arXiv 2312.03732)."""
    return config.alpha / (math.sqrt(config.rank) if config.rslora else config.rank)


def is_adapter(path: str) -> bool:
    """Return whether a parameter belongs to an adapter."""
    return path.rsplit("/", 1)[-1] in PARTS


def find(
    config: LoraConfig,
    linear: Mapping[str, int],
    logical: Mapping[str, Logical],
    where: str = _WHERE,
) -> dict[str, Dims]:
    """Find the linear maps that get an adapter, by path; none at rank 0.

    Args:
        config: its target patterns apply in order; one that starts with ``-`` removes matches of
            those before it.
        linear: path -> number of input dims, the dim of layers not counted.
        logical: path -> logical axes, of all parameters.
        where: the settings group that error messages name.

    Raises:
        ConfigError: a pattern that matches no linear map, or numbers out of range.
    """
    if not config.rank:
        unset = LoraConfig()
        names = ("alpha", "rslora", "dora", "targets", "init", "dropout")
        if unread := [n for n in names if getattr(config, n) != getattr(unset, n)]:
            raise ConfigError(f"{where}.{unread[0]} is set, but {where}.rank is 0: no adapters")
        return {}
    if config.rank < 0 or config.alpha <= 0:
        raise ConfigError(
            f"{where}: rank={config.rank} must be at least 0, alpha={config.alpha:g} above 0"
        )
    check_rate(config.dropout, f"{where}.dropout")
    check_choice(f"{where}.init", config.init, _DRAWS)
    if not config.targets:
        raise ConfigError(f"{where}.targets is empty; {ALL!r} takes all linear maps")
    targets: set[str] = set()
    for pattern in config.targets:
        if pattern.startswith("-"):
            if not fnmatch.filter(logical, pattern[1:]):
                raise ConfigError(f"{where}.targets: {pattern!r} matches no parameter to exclude")
            targets.difference_update(fnmatch.filter(targets, pattern[1:]))
            continue
        matches = linear if pattern == ALL else fnmatch.filter(linear, pattern)
        if not matches:
            others = fnmatch.filter(logical, pattern)
            why = (
                f"it matches {others[0]}, but experts, embeddings, convolutions, norms, biases "
                "and a vision encoder's frozen blocks take no adapter"
                if others
                else "nor any other parameter"
            )
            raise ConfigError(
                f"{where}.targets: {pattern!r} matches no linear map ({why}); known: {ALL}, "
                f"{', '.join(sorted(linear))}"
            )
        targets.update(matches)
    if not targets:
        raise ConfigError(f"{where}.targets={config.targets} leave no linear map")
    return _dims({path: linear[path] for path in sorted(targets)}, logical)


def int8_maps(
    config: LoraConfig,
    linear: Mapping[str, int],
    logical: Mapping[str, Logical],
    where: str = _WHERE,
) -> dict[str, Dims]:
    """Find the linear maps that are stored in int8: all, or none; arguments as :func:`find`.

    Raises:
        ConfigError: an unknown ``base``, or int8 without adapters.
    """
    setting = f"{where}.base={config.base!r}"
    if not config.base:
        return {}
    if config.base != "int8":
        raise ConfigError(
            f"{setting}: set 'int8', or leave it out; config.optim.frozen_dtype is the dtype of "
            "frozen weights that are not quantized"
        )
    if not config.rank:
        raise ConfigError(
            f"{setting} needs adapters, since int8 weights are not trained; set {where}.rank"
        )
    return _dims(linear, logical)


def _dims(linear: Mapping[str, int], logical: Mapping[str, Logical]) -> dict[str, Dims]:
    leads = {path: int(logical[path][0] == "layers") for path in linear}
    return {path: Dims(lead, lead + linear[path]) for path, lead in leads.items()}


def parameters(
    config: LoraConfig,
    chosen: Mapping[str, Dims],
    shapes: Params,
    logical: Mapping[str, Logical],
) -> tuple[Params, dict[str, Logical]]:
    """Return the shapes (float32) and the logical axes of the adapters' parameters.

    Args:
        config: rank and variant.
        chosen: result of :func:`find`.
        shapes: path -> shape in the model without adapters.
        logical: path -> logical axes.
    """
    result: Params = {}
    words: dict[str, Logical] = {}
    for path, (lead, cut) in chosen.items():
        shape, axes = shapes[path].shape, logical[path]
        parts = {
            A: ((*shape[:cut], config.rank), (*axes[:cut], "rank")),
            B: (
                (*shape[:lead], config.rank, *shape[cut:]),
                (*axes[:lead], "rank", *axes[cut:]),
            ),
        }
        if config.dora:
            parts[MAGNITUDE] = ((*shape[:lead], *shape[cut:]), (*axes[:lead], *axes[cut:]))
        for name, (size, part_axes) in parts.items():
            result[f"{path}/{name}"] = jax.ShapeDtypeStruct(size, jnp.float32)
            words[f"{path}/{name}"] = part_axes
    return result, words


def draw(config: LoraConfig, chosen: Mapping[str, Dims], key: jax.Array, weights: Params) -> Params:
    """Draw initial adapters, which do not change the model: B is 0, magnitudes are column norms.

    Args:
        config: initialization of A.
        chosen: result of :func:`find`.
        key: an adapter's draw depends on it and on the map's path only.
        weights: the target maps' arrays.
    """
    result: Params = {}
    for path, (lead, cut) in chosen.items():
        shape = weights[path].shape
        path_key = jax.random.fold_in(key, zlib.crc32(path.encode()))
        size = (*shape[:cut], config.rank)
        result[f"{path}/{A}"] = _DRAWS[config.init](path_key, size, math.prod(shape[lead:cut]))
        result[f"{path}/{B}"] = jnp.zeros((*shape[:lead], config.rank, *shape[cut:]), jnp.float32)
        if config.dora:
            squares = jnp.sum(jnp.square(weights[path]), axis=tuple(range(lead, cut)))
            result[f"{path}/{MAGNITUDE}"] = jnp.sqrt(squares)
    return result


_Draw = Callable[[jax.Array, tuple[int, ...], int], jax.Array]


def _uniform(key: jax.Array, shape: tuple[int, ...], inner: int) -> jax.Array:
    """Draw uniformly from +-1 / sqrt(number of inputs), PEFT's default."""
    return jax.random.uniform(key, shape, jnp.float32, -1.0, 1.0) / math.sqrt(inner)


def _gaussian(key: jax.Array, shape: tuple[int, ...], inner: int) -> jax.Array:
    """Draw from a normal with standard deviation 1 / rank."""
    return jax.random.normal(key, shape, jnp.float32) / shape[-1]


_DRAWS: dict[str, _Draw] = {"uniform": _uniform, "gaussian": _gaussian}


def dropout_keys(
    chosen: Mapping[str, Dims], params: Params, rows: jax.Array, first: jax.Array | None = None
) -> dict[str, jax.Array]:
    """Derive each adapter's dropout keys: u32[B, 2], or [L, B, 2] for a map with a dim of layers.

    Args:
        chosen: result of :func:`find`; adapters with dropout.
        params: parameters of the model and its adapters; only arrays get keys.
        rows: u32[B, 2], the keys of a batch's sequences.
        first: i32[], number of the first of the decoder's layers in ``params`` (a pipeline stage).
    """
    result: dict[str, jax.Array] = {}
    for path, (lead, _) in sorted(chosen.items()):
        a = params.get(f"{path}/{A}")
        if a is None or isinstance(a, jax.ShapeDtypeStruct):
            continue
        keys = fold(rows, path)
        if lead:
            layers = jnp.arange(len(a))
            layers = layers + first if first is not None else layers
            keys = jax.vmap(fold, (None, 0))(keys, layers)
        result[path] = keys
    return result


def attach(
    params: Params,
    factor: float,
    rate: float = 0.0,
    keys: Mapping[str, jax.Array] | None = None,
) -> Params:
    """Replace each adapted map and its adapter in ``params`` by one :class:`Adapted`.

    Args:
        params: parameters of the model and its adapters.
        factor: result of :func:`scale`.
        rate: dropout rate of an adapter's input.
        keys: result of :func:`dropout_keys`; maps without keys have no dropout.
    """
    keys = keys or {}
    result = {path: x for path, x in params.items() if not is_adapter(path)}
    for path in params:
        target, _, name = path.rpartition("/")
        if name == A:
            b, magnitude = params[f"{target}/{B}"], params.get(f"{target}/{MAGNITUDE}")
            parts = (result[target], params[path], b, magnitude)
            result[target] = Adapted(*parts, keys.get(target), factor, rate)
    return result
