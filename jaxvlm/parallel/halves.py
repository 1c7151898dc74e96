"""A computation in two halves: some results soon, the others later from what the first half left.

A pipeline's zero-bubble schedule (arXiv 2401.10241) takes a layer's gradient for its input as soon
as it can, for another stage waits for it, and the gradients of the layer's weights when there is
time. Both come out of one transposed program, which is cut here by what its results need. A scan
over layers is cut inside: the first half's scan stacks what the second half's takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core, source_info_util
from jax.extend.core import primitives

from jaxvlm.parallel import compat

Values = list[Any]


class Halves(NamedTuple):
    """A function of ``(kept, now)``, cut in two."""

    first: Callable[[Any, Any], tuple[Any, Any, Any]]
    """(kept, now) -> the results that are wanted soon; of the later ones those that this half
    makes anyway, None for the others; what :attr:`second` takes besides."""
    second: Callable[[Any, Any], Any]
    """(kept, what the first half left) -> the other results, None for those that it made."""


def halves(f: Callable[[Any, Any], tuple[Any, Any]], kept: Any, now: Any) -> Halves:
    """Cuts ``f(kept, now) -> (later, soon)`` into what gives ``soon`` and what is left to do.

    An equation that both halves need is the first's. So is all of what a ``shard_map`` or another
    equation that is not opened gives, a later result among it.

    Args:
        f: traced once; its calls and checkpoints are opened, and ``prevent_cse`` is lost.
        kept: arrays that are still at hand for the second half.
        now: arrays that are not.

    Raises:
        NotImplementedError: ``f`` has effects (a callback, a reference), which a cut would lose.
    """
    closed, shape = jax.make_jaxpr(_opened(f), return_shape=True)(kept, now)
    effects = [e for e in closed.effects if "NamedAxis" not in type(e).__name__]
    if effects:
        raise NotImplementedError(f"a function with effects cannot be cut in two: {effects}")
    later: Any
    soon: Any
    jaxpr, given = closed.jaxpr, len(closed.consts) + len(jax.tree.leaves(kept))
    later, soon = (jax.tree.structure(x) for x in shape)
    count, at_hand = later.num_leaves, _inputs(jaxpr)[:given]
    is_soon = [i >= count for i in range(len(jaxpr.outvars))]
    made = _made(_live(jaxpr, is_soon)[0])
    is_soon = [yes or _is_in(v, made) for yes, v in zip(is_soon, jaxpr.outvars)]
    cut = _Cut(jaxpr, is_soon, [not yes for yes in is_soon], at_hand, at_hand)

    def first(kept: Any, now: Any) -> tuple[Any, Any, Any]:
        found, left = cut.first([*closed.consts, *jax.tree.leaves((kept, now))])
        found = _spread(found, is_soon)
        return soon.unflatten(found[count:]), later.unflatten(found[:count]), left

    def second(kept: Any, left: Any) -> Any:
        found = cut.second([*closed.consts, *jax.tree.leaves(kept)], left)
        return later.unflatten(_spread(found, [not yes for yes in is_soon[:count]]))

    return Halves(first, second)


class _Cut:
    """The equations of a jaxpr by half. What both halves need is the first's."""

    def __init__(
        self,
        jaxpr: Any,
        soon: Sequence[bool],
        later: Sequence[bool],
        given: Sequence[Any],
        kept: Sequence[Any],
    ):
        """Finds the equations of each half.

        Args:
            jaxpr: what is cut.
            soon: which results the first half makes.
            later: which the second.
            given: the inputs that the second half has without the first.
            kept: the inputs that are made of what is kept, and of nothing that is not.
        """
        self.jaxpr, self.soon, self.later, self.given = jaxpr, soon, later, given
        self.first_eqns = _live(jaxpr, soon)[0]
        smaller = _smaller(jaxpr, _live(jaxpr, later)[0], _made(self.first_eqns), kept)
        self.first_eqns = _live(jaxpr, soon, smaller)[0]
        made = {*_inputs(jaxpr), *_made(self.first_eqns)}
        pure = {*kept}
        for eqn, mask in self.first_eqns:
            if pure.issuperset(_vars(eqn.invars)):
                pure.update(_some(eqn.outvars, mask))
        masks = {id(eqn): mask for eqn, mask in self.first_eqns}
        self.scans: dict[int, _CutScan] = {}
        self.second_eqns: list[Any] = []
        need = {*_vars(_some(jaxpr.outvars, later))}
        for eqn in reversed(jaxpr.eqns):
            mask = [v in need and v not in made for v in eqn.outvars]
            if not any(mask):
                continue
            reads: Any = eqn.invars
            if eqn.primitive is primitives.scan_p:
                scan = _CutScan(eqn, masks.get(id(eqn), [False] * len(mask)), mask, pure)
                self.scans[id(eqn)], reads = scan, _some(eqn.invars, scan.reads)
            self.second_eqns.insert(0, eqn)
            need |= {*_vars(reads)}
        self.needs: set[Any] = need
        """All that the second half reads."""
        self.left = [v for v in _all(jaxpr) if v in need and v in made and v not in {*given}]
        for eqn, mask in self.first_eqns:
            if eqn.primitive is primitives.scan_p and id(eqn) not in self.scans:
                self.scans[id(eqn)] = _CutScan(eqn, mask, [False] * len(mask), pure)

    def first(self, inputs: Values) -> tuple[Values, Any]:
        """All inputs (None for what is not read) -> the soon results, and what is left."""
        env = dict(zip(_inputs(self.jaxpr), inputs))
        stacks: Values = []
        for eqn, mask in self.first_eqns:
            values = [_read(env, v) for v in eqn.invars]
            if eqn.primitive is primitives.scan_p:
                found, stack = self.scans[id(eqn)].first(values)
                stacks.append(stack)
            else:
                found = _bind(eqn, values)
            env.update(_some(zip(eqn.outvars, found), mask))
        outs = [_read(env, v) for v in _some(self.jaxpr.outvars, self.soon)]
        return outs, ([env[v] for v in self.left], stacks)

    def second(self, given: Values, left: Any) -> Values:
        """What is given, what :meth:`first` left -> the later results."""
        values, stacks = left
        env = dict(zip((*self.given, *self.left), (*given, *values)))
        scans = [eqn for eqn, _ in self.first_eqns if eqn.primitive is primitives.scan_p]
        rows = {id(eqn): stack for eqn, stack in zip(scans, stacks)}
        for eqn in self.second_eqns:
            values = [_read(env, v) for v in eqn.invars]
            if eqn.primitive is primitives.scan_p:
                found = self.scans[id(eqn)].second(values, rows.get(id(eqn), ([], [])))
            else:
                found = _bind(eqn, values)
            env.update((v, x) for v, x in zip(eqn.outvars, found) if x is not None)
        return [_read(env, v) for v in _some(self.jaxpr.outvars, self.later)]


class _CutScan:
    """A scan whose body is cut: the first half stacks, row by row, what the second takes."""

    def __init__(self, eqn: Any, soon: Sequence[bool], later: Sequence[bool], pure: set[Any]):
        """As :class:`_Cut`; ``soon`` with all carries that these results need."""
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
        """Which of the scan's inputs the second half reads."""

    def first(self, values: Values) -> tuple[Values, Any]:
        """The scan's inputs -> its results, None for those of the second half; the stacks."""
        consts, init, xs = self._parts(values)

        def body(carry: Values, x: Values) -> tuple[Values, Any]:
            whole = _spread(carry, self.soon[: self.carries])
            outs, left = self.cut.first([*self.body.consts, *consts, *whole, *x])
            return outs[: len(carry)], (outs[len(carry) :], left)

        carry, (ys, stack) = self._scan(body, list(_some(init, self.soon)), xs)
        return _spread([*carry, *ys], self.soon), stack

    def second(self, values: Values, stack: Any) -> Values:
        """The scan's inputs and the stacks -> its other results, None for the first half's."""
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
    """The equations that results need, each with which of its own are made; what they read."""
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


def _made(eqns: Iterable[tuple[Any, list[bool]]]) -> set[Any]:
    """What equations make."""
    return {v for eqn, mask in eqns for v in _some(eqn.outvars, mask)}


def _smaller(
    jaxpr: Any, eqns: Iterable[tuple[Any, list[bool]]], made: set[Any], kept: Sequence[Any]
) -> list[Any]:
    """What the first half should make for the second, being smaller than what it is made of.

    Attention's output is wanted by the gradient of a weight alone: without this, its matrix of
    T x T probabilities would be left. Only what is made of kept values is asked for, which is what
    the forward pass once made: a gradient of weights stays where it is.
    """
    of: dict[Any, frozenset[Any]] = {v: frozenset() for v in kept}
    found = []
    for eqn, mask in eqns:
        reads, outs = [*_vars(eqn.invars)], [*_some(eqn.outvars, mask)]
        if not all(v in of for v in reads):
            continue
        left = frozenset[Any]().union(*(of[v] for v in reads))
        is_made = all(v in made for v in outs)
        if not is_made and sum(map(_bytes, outs)) < sum(map(_bytes, left)):
            found += outs
            is_made = True
        of.update((v, frozenset([v]) if is_made else left) for v in outs)
    return found


def _bytes(v: Any) -> int:
    return v.aval.size * v.aval.dtype.itemsize


def _live_scan(eqn: Any, wanted: list[bool]) -> tuple[list[bool], list[bool]]:
    """Which results are made, which inputs are read, for those that are wanted.

    Made are the carries that are needed too, and what the body makes anyway.
    """
    consts, carries = compat.scan_inputs(eqn.params)
    body = eqn.params["jaxpr"].jaxpr
    while True:
        eqns, need = _live(body, wanted)
        read = [v in need for v in body.invars]
        made = _made(eqns)
        ready = [i >= carries and _is_in(v, made) for i, v in enumerate(body.outvars)]
        more = [*map(max, wanted, read[consts : consts + carries]), *wanted[carries:]]
        more = [*map(max, more, ready)]
        if more == wanted:
            break
        wanted = more
    own = range(consts, consts + carries)
    return wanted, [yes or (i in own and wanted[i - consts]) for i, yes in enumerate(read)]


def _opened(f: Callable[..., Any]) -> Callable[..., Any]:
    """``f`` with its calls and checkpoints written out; a cut goes through them."""

    def opened(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(f, return_shape=True)(*args)
        outs = _open(closed.jaxpr, closed.consts, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shape), outs)

    return opened


def _open(jaxpr: Any, consts: Values, args: Values) -> Values:
    env = dict(zip(_inputs(jaxpr), (*consts, *args)))
    for eqn in jaxpr.eqns:
        values = [_read(env, v) for v in eqn.invars]
        if eqn.primitive is primitives.scan_p:
            found = _open_scan(eqn.params, values)
        elif eqn.primitive in (primitives.jit_p, primitives.remat_p):
            inner = eqn.params["jaxpr"]
            found = _open(getattr(inner, "jaxpr", inner), getattr(inner, "consts", []), values)
        else:
            found = _bind(eqn, values)
        env.update(zip(eqn.outvars, found))
    return [_read(env, v) for v in jaxpr.outvars]


def _open_scan(params: Any, values: Values) -> Values:
    consts, carries = compat.scan_inputs(params)
    body, end = params["jaxpr"], consts + carries

    def step(carry: Values, x: Values) -> tuple[Values, Values]:
        outs = _open(body.jaxpr, body.consts, [*values[:consts], *carry, *x])
        return outs[: len(carry)], outs[len(carry) :]

    how = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, ys = jax.lax.scan(step, values[consts:end], values[end:], **how)
    return [*carry, *ys]


def _bind(eqn: Any, values: Values) -> Values:
    """An equation carried out under its own name, in its own context (mesh, place to compute)."""
    info = eqn.source_info
    names = source_info_util.current_name_stack() + info.name_stack
    with source_info_util.user_context(info.traceback, name_stack=names), eqn.ctx.manager:
        out = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return list(out) if eqn.primitive.multiple_results else [out]


def _inputs(jaxpr: Any) -> list[Any]:
    return [*jaxpr.constvars, *jaxpr.invars]


def _all(jaxpr: Any) -> list[Any]:
    """Every variable, in order."""
    return [*_inputs(jaxpr), *(v for eqn in jaxpr.eqns for v in eqn.outvars)]


def _vars(atoms: Iterable[Any]) -> Iterable[Any]:
    return (v for v in atoms if not isinstance(v, core.Literal))


def _is_in(atom: Any, found: set[Any]) -> bool:
    return not isinstance(atom, core.Literal) and atom in found


def _some(values: Iterable[Any], mask: Iterable[bool]) -> Iterable[Any]:
    return (x for x, yes in zip(values, mask) if yes)


def _spread(values: Iterable[Any], mask: Sequence[bool]) -> Values:
    """Values where the mask is, None elsewhere."""
    rest = iter(values)
    return [next(rest) if yes else None for yes in mask]


def _read(env: dict[Any, Any], atom: Any) -> Any:
    """A value; None for one that this half neither has nor reads."""
    return atom.val if isinstance(atom, core.Literal) else env.get(atom)
