"""Low-rank adapters beside frozen linear maps: LoRA (arXiv 2106.09685), DoRA (arXiv 2402.09353).

An adapter's parameters stand beside their map's in the flat dict: ``…/wq`` has ``…/wq/lora_a``,
``…/wq/lora_b`` and, with DoRA, ``…/wq/magnitude``. No layer knows of them: :func:`attach` puts an
:class:`Adapted` where the array was.
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

from jaxvlm.config import ConfigError, LoraConfig
from jaxvlm.models.quantized import Dims
from jaxvlm.nn.dropout import check_rate, dropout, fold
from jaxvlm.nn.param import Weight, contract
from jaxvlm.types import Logical, Params

PARTS = A, B, MAGNITUDE = "lora_a", "lora_b", "magnitude"
ALL = "all-linear"
"""The pattern of all linear maps."""
_WHERE = "config.model.lora"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapted(Weight):
    """``W + scale A B``; with a magnitude m, each output column as long as m says.

    The low-rank path is taken by activations: the sum of matrices is never made, and a frozen
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
    noise: Any
    """u32[B, 2]: keys of what is dropped of the adapter's input; ``None``: nothing is."""
    scale: float = dataclasses.field(metadata={"static": True})
    rate: float = dataclasses.field(metadata={"static": True})

    def contract(self, x: jax.Array, num_in: int, split: bool) -> jax.Array:
        """``[..., in] x [in, out] -> [..., out]``."""
        seen = dropout(x, self.rate, self.noise)
        low = contract(contract(seen, self.a, num_in, split), self.b, 1, split)
        y = contract(x, self.w, num_in, split)
        low = (self.scale * low).astype(x.dtype)
        y = y + low
        if self.magnitude is None:
            return y
        # A constant to the gradient, as in section 4.3 of DoRA's paper.
        length = jax.lax.stop_gradient(column_norms(self.w, self.a, self.b, self.scale))
        factor = (self.magnitude / length).astype(y.dtype)
        if self.noise is None:
            return y * factor
        # As PEFT has it: what a magnitude other than the length adds takes the dropped input too.
        return y + (contract(seen, self.w, num_in, split) + low) * (factor - 1)

    def dense(self) -> jax.Array:
        """f32[*in, *out]."""
        y = _dense(self.w) + self.scale * jnp.tensordot(self.a, self.b, axes=1)
        if self.magnitude is None:
            return y
        return y * (self.magnitude / column_norms(self.w, self.a, self.b, self.scale))


def _dense(w: jax.Array | Weight) -> jax.Array:
    return w.dense() if isinstance(w, Weight) else w


def column_norms(w: jax.Array | Weight, a: jax.Array, b: jax.Array, scale: float) -> jax.Array:
    """f32[*out]: the L2 norm of each output column of ``w + scale a b``.

    ``|w|^2 + 2 s <w, ab> + s^2 |ab|^2`` with products of rank r: no matrix of ``w``'s size is made,
    unless ``w`` is kept in eight bits.

    Args:
        w: [*in, *out].
        a: [*in, r].
        b: [r, *out].
        scale: s.
    """
    inner, out = math.prod(a.shape[:-1]), b.shape[1:]
    parts = (_dense(w), inner), (a, inner), (b, len(b))
    w, a, b = (x.astype(jnp.float32).reshape(rows, -1) for x, rows in parts)
    cross = jnp.sum(b * (a.T @ w), axis=0)
    low = jnp.sum(b * ((a.T @ a) @ b), axis=0)
    squares = jnp.sum(w * w, axis=0) + 2 * scale * cross + scale**2 * low
    return jnp.sqrt(jnp.maximum(squares, 0.0)).reshape(out)


def scale(config: LoraConfig) -> float:
    """What ``A B`` is multiplied by; rank-stabilised: arXiv 2312.03732."""
    return config.alpha / (math.sqrt(config.rank) if config.rslora else config.rank)


def is_adapter(path: str) -> bool:
    """Whether a parameter is an adapter's."""
    return path.rsplit("/", 1)[-1] in PARTS


def find(
    config: LoraConfig,
    linear: Mapping[str, int],
    logical: Mapping[str, Logical],
    where: str = _WHERE,
) -> dict[str, Dims]:
    """The linear maps that get an adapter, by path; none at rank 0.

    Args:
        config: its patterns, in turn; one after ``-`` takes away from those before it.
        linear: path -> how many of its dims, the layers' left out, are the input's.
        logical: path -> words, of all parameters.
        where: what error messages call ``config``.

    Raises:
        ConfigError: a pattern that no linear map matches, or numbers out of range.
    """
    if not config.rank:
        unset = LoraConfig()
        names = ("alpha", "rslora", "dora", "targets", "init", "dropout")
        if lost := [n for n in names if getattr(config, n) != getattr(unset, n)]:
            raise ConfigError(f"{where}.{lost[0]} is set, but {where}.rank is 0: no adapters")
        return {}
    if config.rank < 0 or config.alpha <= 0:
        raise ConfigError(
            f"{where}: rank={config.rank} must be at least 0, alpha={config.alpha:g} above 0"
        )
    check_rate(config.dropout, f"{where}.dropout")
    if config.init not in _DRAWS:
        raise ConfigError(f"{where}.init={config.init!r}; known: {', '.join(_DRAWS)}")
    if not config.targets:
        raise ConfigError(f"{where}.targets is empty; {ALL!r} takes all linear maps")
    found: set[str] = set()
    for pattern in config.targets:
        if pattern.startswith("-"):
            if not fnmatch.filter(logical, pattern[1:]):
                raise ConfigError(f"{where}.targets: {pattern!r} takes away nothing")
            found.difference_update(fnmatch.filter(found, pattern[1:]))
            continue
        here = linear if pattern == ALL else fnmatch.filter(linear, pattern)
        if not here:
            others = fnmatch.filter(logical, pattern)
            why = (
                f"it matches {others[0]}, but experts, embeddings, convolutions, norms, biases "
                "and what lies in a trunk take no adapter"
                if others
                else "nor any other parameter"
            )
            raise ConfigError(
                f"{where}.targets: {pattern!r} matches no linear map ({why}); known: {ALL}, "
                f"{', '.join(sorted(linear))}"
            )
        found.update(here)
    if not found:
        raise ConfigError(f"{where}.targets={config.targets} leave no linear map")
    return _dims({path: linear[path] for path in sorted(found)}, logical)


def packed(
    config: LoraConfig,
    linear: Mapping[str, int],
    logical: Mapping[str, Logical],
    where: str = _WHERE,
) -> dict[str, Dims]:
    """The linear maps that are kept in eight bits: all of them, or none; arguments as :func:`find`.

    Raises:
        ConfigError: an unknown ``base``, or eight bits without adapters.
    """
    said = f"{where}.base={config.base!r}"
    if config.base not in ("float32", "int8"):
        raise ConfigError(f"{said}; known: float32, int8")
    if config.base == "float32":
        return {}
    if not config.rank:
        raise ConfigError(f"{said} is for adapters: bytes are not trained; set {where}.rank")
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
    """Shapes (float32) and words of the adapters' parameters.

    Args:
        config: rank and variant.
        chosen: of :func:`find`.
        shapes: path -> shape of the model without adapters.
        logical: path -> words.
    """
    made: Params = {}
    words: dict[str, Logical] = {}
    for path, (lead, cut) in chosen.items():
        shape, meaning = shapes[path].shape, logical[path]
        parts = {
            A: ((*shape[:cut], config.rank), (*meaning[:cut], "rank")),
            B: (
                (*shape[:lead], config.rank, *shape[cut:]),
                (*meaning[:lead], "rank", *meaning[cut:]),
            ),
        }
        if config.dora:
            parts[MAGNITUDE] = ((*shape[:lead], *shape[cut:]), (*meaning[:lead], *meaning[cut:]))
        for name, (size, means) in parts.items():
            made[f"{path}/{name}"] = jax.ShapeDtypeStruct(size, jnp.float32)
            words[f"{path}/{name}"] = means
    return made, words


def draw(config: LoraConfig, chosen: Mapping[str, Dims], key: jax.Array, weights: Params) -> Params:
    """Adapters that change nothing yet: B is zero, magnitudes are the columns' own lengths.

    Args:
        config: how A is drawn.
        chosen: of :func:`find`.
        key: an adapter's draw depends on it and on the path alone.
        weights: of the targets; arrays.
    """
    made: Params = {}
    for path, (lead, cut) in chosen.items():
        shape = weights[path].shape
        one = jax.random.fold_in(key, zlib.crc32(path.encode()))
        size = (*shape[:cut], config.rank)
        made[f"{path}/{A}"] = _DRAWS[config.init](one, size, math.prod(shape[lead:cut]))
        made[f"{path}/{B}"] = jnp.zeros((*shape[:lead], config.rank, *shape[cut:]), jnp.float32)
        if config.dora:
            squares = jnp.sum(jnp.square(weights[path]), axis=tuple(range(lead, cut)))
            made[f"{path}/{MAGNITUDE}"] = jnp.sqrt(squares)
    return made


_Draw = Callable[[jax.Array, tuple[int, ...], int], jax.Array]


def _uniform(key: jax.Array, shape: tuple[int, ...], inner: int) -> jax.Array:
    """Between -1 and 1 over the root of the input's size, as PEFT's default has it."""
    return jax.random.uniform(key, shape, jnp.float32, -1.0, 1.0) / math.sqrt(inner)


def _gaussian(key: jax.Array, shape: tuple[int, ...], inner: int) -> jax.Array:
    """Of deviation 1 / rank."""
    return jax.random.normal(key, shape, jnp.float32) / shape[-1]


_DRAWS: dict[str, _Draw] = {"uniform": _uniform, "gaussian": _gaussian}


def noise_of(
    chosen: Mapping[str, Dims], params: Params, rows: jax.Array, first: jax.Array | None = None
) -> dict[str, jax.Array]:
    """Keys of what each adapter drops: u32[B, 2], or [L, B, 2] of a map with a dim of layers.

    Args:
        chosen: of :func:`find`; those that drop.
        params: of the model and its adapters; keys are made of those that are arrays.
        rows: u32[B, 2] keys of a batch's rows.
        first: i32[] the number of the first of the decoder's layers that are here.
    """
    made: dict[str, jax.Array] = {}
    for path, (lead, _) in sorted(chosen.items()):
        a = params.get(f"{path}/{A}")
        if a is None or isinstance(a, jax.ShapeDtypeStruct):
            continue
        own = fold(rows, path)
        if lead:
            layers = jnp.arange(len(a))
            layers = layers + first if first is not None else layers
            own = jax.vmap(fold, (None, 0))(own, layers)
        made[path] = own
    return made


def attach(
    params: Params, factor: float, rate: float = 0.0, noise: Mapping[str, jax.Array] | None = None
) -> Params:
    """``params`` with each adapted map and its adapter as one :class:`Adapted`.

    Args:
        params: of the model and its adapters.
        factor: of :func:`scale`.
        rate: of what is dropped of an adapter's input.
        noise: of :func:`noise_of`; maps without drop nothing.
    """
    noise = noise or {}
    made = {path: x for path, x in params.items() if not is_adapter(path)}
    for path in params:
        target, _, name = path.rpartition("/")
        if name == A:
            b, magnitude = params[f"{target}/{B}"], params.get(f"{target}/{MAGNITUDE}")
            key = noise.get(target)
            made[target] = Adapted(made[target], params[path], b, magnitude, key, factor, rate)
    return made
