"""Split backward (B/W): the input's gradient soon, the weights' later from saved residuals.

A pipeline's zero-bubble schedule (arXiv 2401.10241) takes a layer's gradient for its input (B) as
soon as it can, because another stage waits for it, and the gradients of the layer's weights (W)
when there is time. Both come from one transposed jaxpr, which this module splits by what each
result depends on. A scan over layers is split inside: B's scan stacks the residuals that W's takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core, source_info_util
from jax.extend.core import primitives

from jaxvlm.parallel import compat

Values = list[Any]


class SplitBackward(NamedTuple):
    """A function of ``(kept, now)``, split in two."""

    first: Callable[[Any, Any], tuple[Any, Any, Any]]
    """(kept, now) -> the results that are needed soon; those of the later results that this half
    computes anyway, None for the others; the residuals for :attr:`second`."""
    second: Callable[[Any, Any], Any]
    """(kept, the first half's residuals) -> the other results, None for those it computed."""


def split_backward(f: Callable[[Any, Any], tuple[Any, Any]], kept: Any, now: Any) -> SplitBackward:
    """Split ``f(kept, now) -> (later, soon)`` into what computes ``soon`` and the remainder.

    An equation that both halves need belongs to the first. So do all results of a ``shard_map`` or
    of another equation that is not inlined, later results among them.

    Args:
        f: traced once; its calls and checkpoints are inlined, and ``prevent_cse`` is lost.
        kept: arrays that are still available to the second half.
        now: arrays that are available to the first half alone.

    Raises:
        NotImplementedError: ``f`` has effects (a callback, a reference), which a split would lose.
    """
    closed, shape = jax.make_jaxpr(_inlined(f), return_shape=True)(kept, now)
    effects = [e for e in closed.effects if "NamedAxis" not in type(e).__name__]
    if effects:
        raise NotImplementedError(f"a function with effects cannot be split in two: {effects}")
    later: Any
    soon: Any
    jaxpr, given = closed.jaxpr, len(closed.consts) + len(jax.tree.leaves(kept))
    later, soon = (jax.tree.structure(x) for x in shape)
    count, available = later.num_leaves, _inputs(jaxpr)[:given]
    is_soon = [i >= count for i in range(len(jaxpr.outvars))]
    defined = _defined(_live(jaxpr, is_soon)[0])
    is_soon = [yes or _is_in(v, defined) for yes, v in zip(is_soon, jaxpr.outvars)]
    cut = _Cut(jaxpr, is_soon, [not yes for yes in is_soon], available, available)

    def first(kept: Any, now: Any) -> tuple[Any, Any, Any]:
        results, left = cut.first([*closed.consts, *jax.tree.leaves((kept, now))])
        results = _spread(results, is_soon)
        return soon.unflatten(results[count:]), later.unflatten(results[:count]), left

    def second(kept: Any, left: Any) -> Any:
        results = cut.second([*closed.consts, *jax.tree.leaves(kept)], left)
        return later.unflatten(_spread(results, [not yes for yes in is_soon[:count]]))

    return SplitBackward(first, second)


class _Cut:
    """The equations of a jaxpr by half; an equation that both halves need is in the first."""

    def __init__(
        self,
        jaxpr: Any,
        soon: Sequence[bool],
        later: Sequence[bool],
        given: Sequence[Any],
        kept: Sequence[Any],
    ):
        """Assign the equations to halves.

        Args:
            jaxpr: the jaxpr to split.
            soon: for each result, whether the first half computes it.
            later: for each result, whether the second half computes it.
            given: the inputs that the second half has without the first.
            kept: the inputs that depend on kept values alone.
        """
        self.jaxpr, self.soon, self.later, self.given = jaxpr, soon, later, given
        self.first_eqns = _live(jaxpr, soon)[0]
        smaller = _smaller(jaxpr, _live(jaxpr, later)[0], _defined(self.first_eqns), kept)
        self.first_eqns = _live(jaxpr, soon, smaller)[0]
        defined = {*_inputs(jaxpr), *_defined(self.first_eqns)}
        pure = {*kept}
        for eqn, mask in self.first_eqns:
            if pure.issuperset(_vars(eqn.invars)):
                pure.update(_some(eqn.outvars, mask))
        masks = {id(eqn): mask for eqn, mask in self.first_eqns}
        self.scans: dict[int, _CutScan] = {}
        self.second_eqns: list[Any] = []
        need = {*_vars(_some(jaxpr.outvars, later))}
        for eqn in reversed(jaxpr.eqns):
            mask = [v in need and v not in defined for v in eqn.outvars]
            if not any(mask):
                continue
            reads: Any = eqn.invars
            if eqn.primitive is primitives.scan_p:
                scan = _CutScan(eqn, masks.get(id(eqn), [False] * len(mask)), mask, pure)
                self.scans[id(eqn)], reads = scan, _some(eqn.invars, scan.reads)
            self.second_eqns.insert(0, eqn)
            need |= {*_vars(reads)}
        self.needs: set[Any] = need
        """All variables that the second half reads."""
        self.left = [v for v in _all(jaxpr) if v in need and v in defined and v not in {*given}]
        for eqn, mask in self.first_eqns:
            if eqn.primitive is primitives.scan_p and id(eqn) not in self.scans:
                self.scans[id(eqn)] = _CutScan(eqn, mask, [False] * len(mask), pure)

    def first(self, inputs: Values) -> tuple[Values, Any]:
        """All inputs (None for those that are not read) -> the soon results, and residuals."""
        env = dict(zip(_inputs(self.jaxpr), inputs))
        stacks: Values = []
        for eqn, mask in self.first_eqns:
            values = [_read(env, v) for v in eqn.invars]
            if eqn.primitive is primitives.scan_p:
                results, stack = self.scans[id(eqn)].first(values)
                stacks.append(stack)
            else:
                results = _bind(eqn, values)
            env.update(_some(zip(eqn.outvars, results), mask))
        outs = [_read(env, v) for v in _some(self.jaxpr.outvars, self.soon)]
        return outs, ([env[v] for v in self.left], stacks)

    def second(self, given: Values, left: Any) -> Values:
        """The given inputs, the residuals of :meth:`first` -> the later results."""
        values, stacks = left
        env = dict(zip((*self.given, *self.left), (*given, *values)))
        scans = [eqn for eqn, _ in self.first_eqns if eqn.primitive is primitives.scan_p]
        stack_of = {id(eqn): stack for eqn, stack in zip(scans, stacks)}
        for eqn in self.second_eqns:
            values = [_read(env, v) for v in eqn.invars]
            if eqn.primitive is primitives.scan_p:
                results = self.scans[id(eqn)].second(values, stack_of.get(id(eqn), ([], [])))
            else:
                results = _bind(eqn, values)
            env.update((v, x) for v, x in zip(eqn.outvars, results) if x is not None)
        return [_read(env, v) for v in _some(self.jaxpr.outvars, self.later)]


class _CutScan:
    """A scan whose body is split: the first half stacks the residuals of each iteration."""

    def __init__(self, eqn: Any, soon: Sequence[bool], later: Sequence[bool], pure: set[Any]):
        """Split as :class:`_Cut` does; ``soon`` includes all carries that these results need."""
        self.params = eqn.params
        consts, self.carries = compat.scan_inputs(eqn.params)
        self.body = eqn.params["jaxpr"]
        inputs = self.body.jaxpr.invars
        carry = inputs[consts : consts + self.carries]
        still = [*self.body.jaxpr.constvars, *inputs[:consts], *inputs[consts + self.carries :]]
        kept = [
            v
            for i, (v, atom) in enumerate(zip(inputs, eqn.invars))
            if not consts <= i < consts + self.carries and pure.issuperset(_vars([atom]))
        ]
        self.consts = consts
        self.soon, later = list(soon), list(later)
        while True:
            late = [v for v, yes in zip(carry, later) if yes]
            self.cut: _Cut = _Cut(self.body.jaxpr, soon, later, [*still, *late], kept)
            wanted = [v in self.cut.needs and not own for v, own in zip(carry, soon)]
            more = [*map(max, later, wanted), *later[self.carries :]]
            if more == later:
                break
            later = more
        self.later = later
        read = [v in self.cut.needs for v in inputs]
        self.reads = [
            later[i - consts] if consts <= i < consts + self.carries else yes
            for i, yes in enumerate(read)
        ]
        """For each of the scan's inputs, whether the second half reads it."""

    def first(self, values: Values) -> tuple[Values, Any]:
        """The scan's inputs -> its results, None for those of the second half; the residuals."""
        consts, init, xs = self._parts(values)

        def body(carry: Values, x: Values) -> tuple[Values, Any]:
            carries = _spread(carry, self.soon[: self.carries])
            outs, left = self.cut.first([*self.body.consts, *consts, *carries, *x])
            return outs[: len(carry)], (outs[len(carry) :], left)

        carry, (ys, stack) = self._scan(body, list(_some(init, self.soon)), xs)
        return _spread([*carry, *ys], self.soon), stack

    def second(self, values: Values, stack: Any) -> Values:
        """The scan's inputs and residuals -> its other results, None for the first half's."""
        consts, init, xs = self._parts(values)

        def body(carry: Values, row: Any) -> tuple[Values, Values]:
            x, left = row
            outs = self.cut.second([*self.body.consts, *consts, *x, *carry], left)
            return outs[: len(carry)], outs[len(carry) :]

        carry, ys = self._scan(body, list(_some(init, self.later)), (xs, stack))
        return _spread([*carry, *ys], self.later)

    def _parts(self, values: Values) -> tuple[Values, Values, Values]:
        end = self.consts + self.carries
        return values[: self.consts], values[self.consts : end], values[end:]

    def _scan(self, body: Any, init: Values, xs: Any) -> Any:
        how = {name: self.params[name] for name in ("length", "reverse", "unroll")}
        return jax.lax.scan(body, init, xs, **how)


def _live(
    jaxpr: Any, wanted: Sequence[bool], more: Iterable[Any] = ()
) -> tuple[list[tuple[Any, list[bool]]], set[Any]]:
    """Return the equations that results need, each with a mask of outputs; and what they read."""
    need = {*_vars(_some(jaxpr.outvars, wanted)), *more}
    eqns: list[tuple[Any, list[bool]]] = []
    for eqn in reversed(jaxpr.eqns):
        mask = [v in need for v in eqn.outvars]
        if not any(mask):
            continue
        reads = eqn.invars
        if eqn.primitive is primitives.scan_p:
            mask, used = _live_scan(eqn, mask)
            reads = _some(reads, used)
        else:
            mask = [True] * len(mask)
        eqns.insert(0, (eqn, mask))
        need |= {*_vars(reads)}
    return eqns, need


def _defined(eqns: Iterable[tuple[Any, list[bool]]]) -> set[Any]:
    """Return the variables that equations define."""
    return {v for eqn, mask in eqns for v in _some(eqn.outvars, mask)}


def _smaller(
    jaxpr: Any, eqns: Iterable[tuple[Any, list[bool]]], defined: set[Any], kept: Sequence[Any]
) -> list[Any]:
    """Return variables that the first half should compute for the second to save smaller residuals.

    Attention's output is needed by the gradient of a weight alone: without this, its matrix of
    T x T probabilities would be saved. Only variables that depend on kept values alone qualify,
    that is, values of the forward pass: gradients of weights stay in the second half.
    """
    of: dict[Any, frozenset[Any]] = {v: frozenset() for v in kept}
    results = []
    for eqn, mask in eqns:
        reads, outs = [*_vars(eqn.invars)], [*_some(eqn.outvars, mask)]
        if not all(v in of for v in reads):
            continue
        left = frozenset[Any]().union(*(of[v] for v in reads))
        is_defined = all(v in defined for v in outs)
        if not is_defined and sum(map(_bytes, outs)) < sum(map(_bytes, left)):
            results += outs
            is_defined = True
        of.update((v, frozenset([v]) if is_defined else left) for v in outs)
    return results


def _bytes(v: Any) -> int:
    return v.aval.size * v.aval.dtype.itemsize


def _live_scan(eqn: Any, wanted: list[bool]) -> tuple[list[bool], list[bool]]:
    """Return masks of the results that are computed and of the inputs that are read for ``wanted``.

    Computed are also the carries that these need, and the results that the body computes anyway.
    """
    consts, carries = compat.scan_inputs(eqn.params)
    body = eqn.params["jaxpr"].jaxpr
    while True:
        eqns, need = _live(body, wanted)
        read = [v in need for v in body.invars]
        defined = _defined(eqns)
        ready = [i >= carries and _is_in(v, defined) for i, v in enumerate(body.outvars)]
        more = [*map(max, wanted, read[consts : consts + carries]), *wanted[carries:]]
        more = [*map(max, more, ready)]
        if more == wanted:
            break
        wanted = more
    own = range(consts, consts + carries)
    return wanted, [yes or (i in own and wanted[i - consts]) for i, yes in enumerate(read)]


def _inlined(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``f`` with its calls and checkpoints inlined, so that a split can go through them."""

    def inlined(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(f, return_shape=True)(*args)
        outs = _inline(closed.jaxpr, closed.consts, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shape), outs)

    return inlined


def _inline(jaxpr: Any, consts: Values, args: Values) -> Values:
    env = dict(zip(_inputs(jaxpr), (*consts, *args)))
    for eqn in jaxpr.eqns:
        values = [_read(env, v) for v in eqn.invars]
        if eqn.primitive is primitives.scan_p:
            results = _inline_scan(eqn.params, values)
        elif eqn.primitive in (primitives.jit_p, primitives.remat_p):
            inner = eqn.params["jaxpr"]
            results = _inline(getattr(inner, "jaxpr", inner), getattr(inner, "consts", []), values)
        else:
            results = _bind(eqn, values)
        env.update(zip(eqn.outvars, results))
    return [_read(env, v) for v in jaxpr.outvars]


def _inline_scan(params: Any, values: Values) -> Values:
    consts, carries = compat.scan_inputs(params)
    body, end = params["jaxpr"], consts + carries

    def step(carry: Values, x: Values) -> tuple[Values, Values]:
        outs = _inline(body.jaxpr, body.consts, [*values[:consts], *carry, *x])
        return outs[: len(carry)], outs[len(carry) :]

    how = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, ys = jax.lax.scan(step, values[consts:end], values[end:], **how)
    return [*carry, *ys]


def _bind(eqn: Any, values: Values) -> Values:
    """Evaluate an equation under its own name stack and context (mesh, compute location)."""
    info = eqn.source_info
    names = source_info_util.current_name_stack() + info.name_stack
    with source_info_util.user_context(info.traceback, name_stack=names), eqn.ctx.manager:
        out = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return list(out) if eqn.primitive.multiple_results else [out]


def _inputs(jaxpr: Any) -> list[Any]:
    return [*jaxpr.constvars, *jaxpr.invars]


def _all(jaxpr: Any) -> list[Any]:
    """Return all variables, in order."""
    return [*_inputs(jaxpr), *(v for eqn in jaxpr.eqns for v in eqn.outvars)]


def _vars(atoms: Iterable[Any]) -> Iterable[Any]:
    return (v for v in atoms if not isinstance(v, core.Literal))


def _is_in(atom: Any, variables: set[Any]) -> bool:
    return not isinstance(atom, core.Literal) and atom in variables


def _some(values: Iterable[Any], mask: Iterable[bool]) -> Iterable[Any]:
    return (x for x, yes in zip(values, mask) if yes)


def _spread(values: Iterable[Any], mask: Sequence[bool]) -> Values:
    """Place values where the mask is true, None elsewhere."""
    rest = iter(values)
    return [next(rest) if yes else None for yes in mask]


def _read(env: dict[Any, Any], atom: Any) -> Any:
    """Return a value; None for one that this half neither has nor reads."""
    return atom.val if isinstance(atom, core.Literal) else env.get(atom)
