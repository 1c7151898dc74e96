"""Disaggregated vision encoder: a train step on two meshes, the encoder's and that of the rest.

Each program runs on one mesh. Features, their gradients, and an array of the gradients' norms are
sent between the meshes. JAX only enqueues programs on the devices, so programs that do not depend
on the other mesh's current work run concurrently with it: a frozen encoder is a batch ahead of the
rest, and a trained one encodes microbatches while the rest trains on those before.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxvlm.parallel import transfer
from jaxvlm.parallel.sharding import HOST
from jaxvlm.train.grad_accum import (
    FEATURES,
    check_microbatches,
    merge_microbatches,
    scales,
    split_microbatches,
    total,
)
from jaxvlm.train.peak_memory import PeakMemory
from jaxvlm.train.program_memory import bytes_of
from jaxvlm.train.step import Placement, finish, judge, report, squares, update
from jaxvlm.types import Batch, Loss, Params, Runner, Sums, TrainState, is_vision_path

ENCODER_PROGRAMS = ("encode", "zeros", "backward", "squares", "update")
"""Programs that run on the encoder's mesh."""
_LAST = ("step", "update", "finish")
"""Programs whose results are the new state, in the donated buffers of the old one."""
AHEAD = 1
"""Groups of microbatches that a trained encoder encodes ahead of the rest."""


class EncoderAndRest(NamedTuple):
    """A value for each of the two meshes: the encoder's, and that of the rest."""

    encoder: Any
    rest: Any


_NONE = EncoderAndRest(0, 0)


def cut(state: TrainState, move: Callable[[Any], Any]) -> EncoderAndRest:
    """Split a train state into the encoder's and the rest's.

    Args:
        state: the run's state: each parameter, with its moments, is on its own mesh; all else on
            the rest's.
        move: copies leaves that belong to no parameter to the encoder's mesh.
    """

    def part(belongs: Callable[[str], bool], copy: Callable[[Any], Any]) -> TrainState:
        def pick(node: Any) -> Any:
            if not isinstance(node, dict):
                return copy(node)
            return {path: x for path, x in node.items() if belongs(path)}

        opt_state = jax.tree.map(pick, state.opt_state, is_leaf=_is_dict)
        return state._replace(
            params=pick(state.params), frozen=pick(state.frozen), opt_state=opt_state
        )

    return EncoderAndRest(
        part(is_vision_path, move), part(lambda path: not is_vision_path(path), lambda x: x)
    )


def join(rest: TrainState, encoder: TrainState) -> TrainState:
    """Invert :func:`cut`; leaves that belong to no parameter are taken from ``rest``."""

    def both(a: Any, b: Any) -> Any:
        return {**a, **b} if isinstance(a, dict) else a

    return rest._replace(
        params={**rest.params, **encoder.params},
        frozen={**rest.frozen, **encoder.frozen},
        opt_state=jax.tree.map(both, rest.opt_state, encoder.opt_state, is_leaf=_is_dict),
    )


def _is_dict(node: Any) -> bool:
    return isinstance(node, dict)


@dataclasses.dataclass(frozen=True)
class DisaggregatedStep(abc.ABC):
    """Programs on two meshes that together are ``(state, batch) -> (state, metrics)``.

    The base class of :class:`FrozenEncoder` and :class:`TrainedEncoder`, which call the programs.
    """

    programs: Mapping[str, Any]
    rows: EncoderAndRest
    """Shardings of batches."""
    replicate: EncoderAndRest
    """Shardings of replicated values."""
    between: EncoderAndRest
    """Shardings of features and their gradients in transfer: with as many shards on both meshes,
    or JAX would block and copy them through the host."""
    move: Callable[[Any, Any], Any] = transfer.move
    """Copies arrays to a sharding."""
    held: EncoderAndRest = _NONE
    """Bytes of a state and a batch on one device of each mesh."""
    peak: EncoderAndRest = _NONE
    """Peak bytes on one device of each mesh while its programs run."""
    host: int = 0
    """Bytes of the state in host memory, for one device of each mesh."""
    cache: dict[Any, Any] = dataclasses.field(default_factory=dict)
    """Compiled programs, by name and argument shapes."""

    @abc.abstractmethod
    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        """Take a step, as a compiled :func:`jaxvlm.train.step.make_step`."""

    def compiled(self, state: TrainState, batch: Batch) -> DisaggregatedStep:
        """Return this step with its programs compiled for the shapes of a state and a batch."""
        state, batch = jax.tree.map(lambda x: like(x, x.sharding), (state, batch))
        ready: dict[str, Any] = {}
        alive = PeakMemory(ENCODER_PROGRAMS, _LAST)

        def move(tree: Any, sharding: Any) -> Any:
            return alive.allocate(like(tree, sharding))

        def shapes_of(name: str, program: Any) -> Callable[..., Any]:
            def run(*args: Any) -> Any:
                signature = [
                    (x.shape, x.dtype, getattr(x, "sharding", None)) for x in jax.tree.leaves(args)
                ]
                key = (name, jax.tree.structure(args), *signature)
                if key not in self.cache:
                    lowered = program.lower(*args)
                    self.cache[key] = lowered.out_info, lowered.compile()
                out, ready[name] = self.cache[key]
                out = jax.tree.map(like, out, ready[name].output_shardings)
                return alive.call(name, ready[name], args, out)

            return run

        traced = {name: shapes_of(name, program) for name, program in self.programs.items()}
        dataclasses.replace(self, programs=traced, move=move)(state, batch)
        held, host = [0, 0], 0
        for x in jax.tree.leaves((state, batch)):
            if x.sharding.memory_kind == HOST:
                host += bytes_of(x)
            else:
                held[x.sharding.device_set != self.replicate.encoder.device_set] += bytes_of(x)
        most = alive.most(self.replicate.encoder.device_set)
        return dataclasses.replace(
            self,
            programs=ready,
            held=EncoderAndRest(*held),
            peak=EncoderAndRest(held[0] + most[0], held[1] + most[1]),
            host=host,
        )

    def memory(self) -> dict[str, int]:
        """Return bytes on a device of each mesh; see ``jaxvlm.train.program_memory.memory``."""
        sizes: dict[str, int] = {}
        for name, held, peak in zip(EncoderAndRest._fields, self.held, self.peak):
            sizes |= {f"{name}, state and batch": held, f"{name}, work": peak - held}
            sizes[f"{name}, peak"] = peak
        return sizes | ({"host": self.host} if self.host else {})

    def with_dropout_keys(self, step: Any, batch: Batch) -> Batch:
        """Return the batch with dropout keys, where something is dropped."""
        if "dropout_keys" not in self.programs:
            return batch
        rows = Batch(batch.tokens, None, None, None)
        return batch._replace(dropout_keys=self.programs["dropout_keys"](step, rows).dropout_keys)

    def images(self, batch: Batch) -> tuple[Batch | None, Batch]:
        """Split a batch into the encoder's input (``None``: no images) and the rest's.

        ``pixels`` or ``patches`` are on the encoder's mesh, all else on the rest's.
        """
        others = batch._replace(pixels=None, patches=None)
        if batch.pixels is None and batch.patches is None:
            return None, others

        def to_encoder(x: Any) -> Any:  # in shards that both meshes have; see ``between``
            return (
                x if x is None else self.move(self.move(x, self.between.rest), self.between.encoder)
            )

        images = Batch(None, None, None, None, pixels=batch.pixels, patches=batch.patches)
        return images._replace(
            grid=to_encoder(batch.grid), dropout_keys=to_encoder(batch.dropout_keys)
        ), others


def like(tree: Any, sharding: Any) -> Any:
    """Return ShapeDtypeStructs of arrays with a sharding."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def encode(
    encoder: Callable[[Params, Batch], Any], params: Params, images: Batch, parts: int
) -> Any:
    """Encode a batch in ``parts`` microbatches, one after the other."""
    if parts == 1:
        return encoder(params, images)
    return merge_microbatches(
        jax.lax.map(lambda part: encoder(params, part), split_microbatches(images, parts))
    )


class FrozenEncoder(DisaggregatedStep):
    """A step with a frozen encoder: features are part of the batch.

    Programs: ``encode(frozen, images)`` and ``step(state, batch)``.
    """

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        """Take a step, as a compiled :func:`jaxvlm.train.step.make_step`."""
        encoder, rest = cut(state, lambda x: x)
        images, batch = self.images(batch)
        if images is not None:
            features = self.programs["encode"](encoder.frozen, images)
            batch = batch._replace(features=self.move(features, self.between.rest))
        new, metrics = self.programs["step"](rest, batch)
        return join(new, encoder._replace(opt_state=new.opt_state)), metrics


@dataclasses.dataclass(frozen=True)
class TrainedEncoder(DisaggregatedStep):
    """A step with a trained encoder; ``groups`` of microbatches run one after the other.

    Programs: the methods of :class:`EncoderPrograms`.
    """

    groups: int = 1

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        """Take a step, as a compiled :func:`jaxvlm.train.step.make_step`."""
        run, between, replicate = self.programs, self.between, self.replicate
        batch = self.with_dropout_keys(state.step, batch)
        encoder, rest = cut(state, lambda x: self.move(x, replicate.encoder))
        images, batch = self.images(batch)
        encoder_params = encoder.params, encoder.frozen
        rest_params = rest.params, rest.frozen

        def features(m: int) -> Any:
            if images is None or m >= self.groups:
                return None
            return self.move(run["encode"](*encoder_params, images, np.int32(m)), between.rest)

        encoded = [features(m) for m in range(AHEAD)]
        scale, carry = run["begin"](*rest_params, batch, encoded[0])
        grads = run["zeros"](encoder.params)
        for m in range(self.groups):
            encoded.append(features(m + AHEAD))
            part = np.int32(m)
            carry, back = run["gradients"](*rest_params, batch, part, scale, carry, encoded.pop(0))
            if images is not None:
                back = self.move(back, between.encoder)
                grads = run["backward"](*encoder_params, images, part, back, grads)
        value, norms = run["norms"](scale, carry)
        encoder_norms = run["squares"](grads)
        to_encoder = self.move((value, norms), replicate.encoder)
        to_rest = self.move(encoder_norms, replicate.rest)
        params, opt_state = run["update"](
            encoder.params, encoder.opt_state, grads, *to_encoder, encoder_norms
        )
        new, metrics = run["finish"](rest, batch, scale, carry, value, norms, to_rest)
        return join(new, encoder._replace(params=params, opt_state=opt_state)), metrics


@dataclasses.dataclass(frozen=True)
class EncoderPrograms:
    """The programs of :class:`TrainedEncoder`: pure functions, each for one of the two meshes."""

    encoder: Callable[[Params, Batch], Any]
    """The encoder's parameters and its part of a batch -> ``Batch.features``."""
    runner: Runner
    """The rest's runner; features are among its parameters."""
    loss: Loss
    tx: optax.GradientTransformation
    place: EncoderAndRest
    """A Placement for each mesh."""
    sums: EncoderAndRest
    """Constrains the sharding of each mesh's gradients while they are added up."""
    rows: Any
    """The sharding of the rest's batch."""
    groups: int
    """Groups of microbatches in a batch."""
    group: int
    """Microbatches in a group: as many as the rest's runner takes together."""

    def _group(self, batch: Batch, m: Any) -> Batch:
        return jax.tree.map(
            lambda x: jax.lax.dynamic_index_in_dim(x, m, 0, False),
            split_microbatches(batch, self.groups),
        )

    def encode(self, params: Params, frozen: Params, images: Batch, m: Any) -> Any:
        """Encoder's mesh: return the features of group ``m``."""
        gathered = self.place.encoder.all_gather
        both = {**gathered(params), **gathered(frozen)}
        return encode(self.encoder, both, self._group(images, m), self.group)

    def begin(
        self, params: Params, frozen: Params, batch: Batch, features: Any
    ) -> tuple[Any, tuple[Sums, Params]]:
        """Rest's mesh: return the terms' scales, and zeros to add to.

        Only the batch's values are read, of all else the shapes.

        Raises:
            ConfigError: microbatches that would change the gradient, or do not divide the batch.
        """
        check_microbatches(self.groups * self.group, self.loss, batch.tokens.shape[0])
        scale, m = scales(self.loss, batch), jnp.int32(0)
        sums, (grads, _) = jax.eval_shape(self._grads, params, frozen, batch, m, scale, features)
        sums, grads = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (sums, grads))
        return scale, (sums, self.sums.rest(grads))

    def _grads(
        self, params: Params, frozen: Params, batch: Batch, m: Any, scale: Any, features: Any
    ) -> tuple[Sums, tuple[Params, Any]]:
        gathered = self.place.rest.all_gather
        params, part = gathered(params), self._group(batch, m)
        if features is not None:
            params = {**params, FEATURES: jax.lax.with_sharding_constraint(features, self.rows)}
        sums, grads = self.runner.loss_grad(params, gathered(frozen), part, self.loss, scale)
        back = grads.pop(FEATURES, None)
        return sums, (grads, back)

    def gradients(
        self,
        params: Params,
        frozen: Params,
        batch: Batch,
        m: Any,
        scale: Any,
        carry: tuple[Sums, Params],
        features: Any,
    ) -> tuple[tuple[Sums, Params], Any]:
        """Rest's mesh: add the sums and gradients of group ``m``; return its features' gradient."""
        sums, (grads, back) = self._grads(params, frozen, batch, m, scale, features)
        sums, grads = jax.tree.map(jnp.add, carry, (sums, self.sums.rest(grads)))
        return (sums, self.sums.rest(grads)), back

    def zeros(self, params: Params) -> Params:
        """Encoder's mesh: return zeros to add gradients to."""
        return self.sums.encoder({p: jnp.zeros(x.shape, x.dtype) for p, x in params.items()})

    def backward(
        self, params: Params, frozen: Params, images: Batch, m: Any, back: Any, grads: Params
    ) -> Params:
        """Encoder's mesh: add to ``grads`` those of group ``m``, from its features' gradient.

        It recomputes the forward pass, so that no activations are kept between programs.
        """
        # All-gather first: where that quantizes, gradients are those of the rounded weights.
        gathered, group = self.place.encoder.all_gather, self._group(images, m)
        params, frozen = gathered(params), gathered(frozen)

        def add(grads: Params, part: Any) -> tuple[Params, None]:
            rows, d_features = part
            _, pull = jax.vjp(lambda p: self.encoder({**p, **frozen}, rows), params)
            more = self.sums.encoder(pull(d_features)[0])
            return self.sums.encoder(jax.tree.map(jnp.add, grads, more)), None

        if self.group == 1:
            return add(grads, (group, back))[0]
        return jax.lax.scan(add, grads, split_microbatches((group, back), self.group))[0]

    def squares(self, grads: Params) -> Any:
        """Encoder's mesh: return the squared norms of its gradients."""
        return squares(self.place.encoder.constrain(grads))

    def norms(self, scale: Any, carry: tuple[Sums, Params]) -> tuple[Any, Any]:
        """Rest's mesh: return the loss, and the squared norms of its gradients."""
        return total(carry[0], scale), squares(self.place.rest.constrain(carry[1]))

    def update(
        self,
        params: Params,
        opt_state: Any,
        grads: Params,
        value: Any,
        norms: Any,
        encoder_norms: Any,
    ) -> tuple[Params, Any]:
        """Encoder's mesh: update parameters and moments; the rest's norms come before its own."""
        place: Placement = self.place.encoder
        verdict = judge(value, jnp.concatenate([norms, encoder_norms]))
        return update(verdict, params, opt_state, place.constrain(grads), self.tx, place)

    def finish(
        self,
        state: TrainState,
        batch: Batch,
        scale: Any,
        carry: tuple[Sums, Params],
        value: Any,
        norms: Any,
        encoder_norms: Any,
    ) -> tuple[TrainState, dict[str, Any]]:
        """Rest's mesh: return its state after the step, and the metrics."""
        place: Placement = self.place.rest
        sums, grads = carry
        verdict = judge(value, jnp.concatenate([norms, encoder_norms]))
        changed = update(
            verdict, state.params, state.opt_state, place.constrain(grads), self.tx, place
        )
        new = finish(state, verdict, *changed, state.comm)
        return new, report(new, verdict, self.loss, sums, scale, batch)
