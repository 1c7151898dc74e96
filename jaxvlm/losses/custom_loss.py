"""A loss of the user's own, checked against the protocol ``Loss`` wherever a step calls it.

What it gives is looked at where a step is traced, and costs a compiled step nothing. Whether it
adds up is a question of numbers, which :func:`check_sums` asks once, before a run begins.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
from collections.abc import Mapping
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from jaxvlm.config import ConfigError, extension
from jaxvlm.types import Batch, Embeddings, Loss, Out, Pairs, Sums

RESERVED = {
    *("loss", "grad_norm", "skipped", "skipped_updates", "bad_in_a_row", "bad_leaf"),
    *("tokens", "images", "tokens_per_s", "images_per_s", "mfu", "learning_rate", "busy_stages"),
    *("seconds", "wait_share", "step_ms", "wait_ms", "host_ms", "device_ms", "goodput"),
    *("slowest_process", "slowest_process_ms", "median_process_ms"),
}
"""Metrics of every run, whose names no metric of a loss may have."""
RESERVED_PREFIXES = ("loss/", "no_weight/", "cache/")
_TOLERANCE = 0.01
"""Largest relative difference of a sum and its parts: what a sum of bfloat16 numbers has. A mean
over two equal halves is off by 0.5."""
_MEMBERS = ("additive", "weights", "coefficients", "__call__")


@dataclasses.dataclass(frozen=True)
class CustomLoss:
    """Passes on the sums and weights of ``loss``, once they are what the protocol says.

    Args:
        loss: the user's own.
        what: the setting that named it, for messages.
        factors: its coefficients.
    """

    loss: Any
    what: str
    factors: tuple[tuple[str, float], ...] = ()

    @classmethod
    def of(cls, loss: Any, what: str) -> CustomLoss:
        """Check what is known of a loss before there is a batch.

        Raises:
            ConfigError: a member is missing, or the coefficients can't be used.
        """
        if missing := [name for name in _MEMBERS if not hasattr(loss, name)]:
            raise ConfigError(
                f"{what} is no loss: it has no {', '.join(missing)}; see the protocol Loss in "
                "jaxvlm/types.py"
            )
        self = cls(loss, what)
        if not isinstance(loss.additive, bool | np.bool_):
            raise ConfigError(
                f"{what}: additive is {_shown(loss.additive)}; it must be True or False, as an "
                "attribute or a property"
            )
        given = self._call("coefficients")
        self._check_names("coefficients", "it", given)
        factors = {}
        for name, value in given.items():
            try:
                factors[name] = float(value)
            except Exception:  # whatever float() of a user's object may raise
                factors[name] = math.nan
            if not math.isfinite(factors[name]):
                self._refuse("coefficients", f"gave {_shown(value)} for {name!r}", "a finite float")
        if not any(factors.values()):
            self._refuse(
                "coefficients",
                "gave 0 for every term, so that nothing would be trained",
                "a factor other than 0",
            )
        return dataclasses.replace(self, factors=tuple(factors.items()))

    @property
    def name(self) -> str:
        """The name of the user's class."""
        return type(self.loss).__name__

    @property
    def additive(self) -> bool:
        """Whether the loss is a sum over examples."""
        return bool(self.loss.additive)

    def coefficients(self) -> Mapping[str, float]:
        """Return the coefficient of each term."""
        return dict(self.factors)

    def weights(self, batch: Any) -> dict[str, Any]:
        """Return the denominators, f32[] each.

        Raises:
            ConfigError: see :meth:`__call__`.
        """
        given = self._call("weights", batch)
        self._check_terms("weights", "it", given)
        return {
            name: self._scalar("weights", f"the term {name!r}", given[name])
            for name, _ in self.factors
        }

    def __call__(self, out: Any, batch: Any) -> Sums:
        """Return the sums over ``batch``.

        Raises:
            ConfigError: the user's code failed, or gave something else than sums; the message
                names its file and line.
        """
        sums = self._call("__call__", out, batch)
        if not isinstance(sums, Sums):
            self._refuse("__call__", f"gave {_shown(sums)}", "jaxvlm.types.Sums(terms, metrics)")
        self._check_terms("__call__", "Sums.terms", sums.terms)
        terms = {}
        for name, _ in self.factors:
            terms[name] = self._scalar("__call__", f"the term {name!r}", sums.terms[name])
            if not jnp.issubdtype(jnp.result_type(sums.terms[name]), jnp.floating):
                self._refuse(
                    "__call__",
                    f"gave a whole number for the term {name!r}",
                    "a float, which has a gradient",
                )
        return Sums(terms, self._metrics(sums.metrics))

    def _metrics(self, given: Any) -> dict[str, tuple[Any, Any]]:
        if not isinstance(given, Mapping):
            self._refuse(
                "__call__",
                f"gave {_shown(given)} as Sums.metrics",
                "a dict of (sum, weight) pairs, or {}",
            )
        metrics = {}
        for name, pair in given.items():
            if not isinstance(name, str) or name in RESERVED or name.startswith(RESERVED_PREFIXES):
                self._refuse(
                    "__call__",
                    f"gave a metric named {name!r}, which is a name of jaxvlm's own",
                    "another name",
                )
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                self._refuse(
                    "__call__",
                    f"gave {_shown(pair)} for the metric {name!r}",
                    "a pair (sum, weight), whose quotient is reported",
                )
            words = ("the sum of", "the weight of")
            a, b = (
                self._scalar("__call__", f"{word} the metric {name!r}", x)
                for word, x in zip(words, pair, strict=True)
            )
            metrics[name] = (a, b)
        return metrics

    def _check_names(self, member: str, holder: str, given: Any) -> None:
        if (
            not isinstance(given, Mapping)
            or not given
            or not all(isinstance(x, str) for x in given)
        ):
            self._refuse(
                member,
                f"gave {_shown(given)}" + (f" as {holder}" if holder != "it" else ""),
                "a dict with a number for each term, such as {'loss': ...}",
            )

    def _check_terms(self, member: str, holder: str, given: Any) -> None:
        """Refuse a dict whose terms are not those of ``coefficients``."""
        self._check_names(member, holder, given)
        known = dict(self.factors)
        if set(given) != set(known):
            self._refuse(
                member,
                f"gave the terms {_listed(given)}, and coefficients() gives {_listed(known)}",
                "the same terms in coefficients(), weights() and Sums.terms",
            )

    def _scalar(self, member: str, of: str, value: Any) -> jax.Array:
        shape: tuple[int, ...] = ()
        kind = jnp.dtype(object)
        if isinstance(value, bool | int | float | np.generic | np.ndarray | jax.Array):
            shape, kind = jnp.shape(value), jnp.result_type(value)
        if shape or not any(jnp.issubdtype(kind, x) for x in (jnp.floating, jnp.integer, bool)):
            what = f"an array of shape {list(shape)}" if shape else _shown(value)
            self._refuse(member, f"gave {what} for {of}", "one number, f32[], such as jnp.sum(x)")
        return jnp.asarray(value, jnp.float32)

    def _call(self, member: str, *args: Any) -> Any:
        try:
            return getattr(self.loss, member)(*args)
        except ConfigError:
            raise
        except Exception as error:  # whatever a user's code may raise
            file = _code_of(self.loss, member)[0]
            raise ConfigError(
                f"{self.what}: {member}() failed {extension.failure(error, file)}"
            ) from error

    def _refuse(self, member: str, fault: str, wanted: str) -> NoReturn:
        file, line = _code_of(self.loss, member)
        where = f" at {os.path.basename(file)}:{line}" if file else ""
        raise ConfigError(f"{self.what}: {member}(){where} {fault}; it must give {wanted}")


def check_sums(loss: Loss, what: str, out: Out | Embeddings, batch: Batch | Pairs) -> None:
    """Refuse a loss that says that it is a sum over examples, and is not.

    Args:
        loss: the user's own, wrapped or not.
        what: the setting that named it, for messages.
        out: the output of some model for ``batch``.
        batch: two examples or more.

    Raises:
        ConfigError: a weight that is negative or not finite, or sums over the two halves of
            ``batch`` that do not add up to those over the whole.
    """
    for name, weight in jax.jit(loss.weights)(batch).items():
        if not 0 <= float(weight) < math.inf:
            raise ConfigError(
                f"{what}: weights() gave {float(weight):g} for the term {name!r}; it must give a "
                "finite number of 0 or more, which the term's sum is divided by"
            )
    run = jax.jit(lambda out, batch: loss(out, batch).terms)
    whole = run(out, batch)
    if not loss.additive:
        return
    rows = len(jax.tree.leaves(batch)[0])
    halves = [run(*_taken(out, batch, part)) for part in (slice(rows // 2), slice(rows // 2, rows))]
    for name, value in whole.items():
        total, parts = float(value), [float(half[name]) for half in halves]
        largest = max(map(abs, (total, *parts)))
        if math.isfinite(largest) and abs(total - sum(parts)) > _TOLERANCE * largest:
            raise ConfigError(
                f"{what}: additive is True, but the term {name!r} is no sum over examples: it is "
                f"{total:.6g} over a batch, and {parts[0]:.6g} + {parts[1]:.6g} over its halves; "
                "__call__ must return sums, never means (weights() gives what they are divided "
                "by), or set additive = False where a term compares examples"
            )


def _taken(out: Any, batch: Any, part: slice) -> tuple[Any, Any]:
    """Rows of a batch and of its output."""
    of_rows = ("hidden",) if isinstance(out, Out) else Embeddings._fields[:4]
    own = {name: getattr(out, name) for name in of_rows}
    own, batch = jax.tree.map(lambda x: x[part], (own, batch))
    return out._replace(**own), batch


def _code_of(loss: Any, member: str) -> tuple[str, int]:
    """File and line of a member that is written in Python; ("", 0) of others."""
    code = getattr(inspect.unwrap(getattr(type(loss), member, None) or loss), "__code__", None)
    return (code.co_filename, code.co_firstlineno) if code else ("", 0)


def _shown(value: Any) -> str:
    """A short description of a value, which may be traced."""
    if isinstance(value, jax.Array | np.ndarray):
        return f"an array of shape {list(value.shape)}"
    text = repr(value) if isinstance(value, bool | int | float | str | None) else ""
    if isinstance(value, Mapping) and not value:
        text = "{}"
    return text if 0 < len(text) <= 40 else f"a {type(value).__name__}"


def _listed(terms: Any) -> str:
    return ", ".join(map(repr, sorted(terms)))
