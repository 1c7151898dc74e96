"""Sites that take one step of SGD between outer updates are data parallel."""

import jax
import numpy as np
import optax
import pytest
from builders import TINY, devices_of, random_batch
from numerics import close

from jaxvlm.config import FederateConfig, MeshConfig, OuterConfig
from jaxvlm.federate import codec, coordinator
from jaxvlm.federate.coordinator import Plan
from jaxvlm.federate.messages import Update
from jaxvlm.losses.next_token import NextToken
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.spmd.model import build_model
from jaxvlm.spmd.train_step import assemble

ONE = MeshConfig(1, 1, 1)
TX = optax.sgd(0.5)


@pytest.fixture(scope="module")
def stepper():
    """Compiled for a batch of any number of rows: (params, batch) -> params after one step."""
    model = build_model(TINY, make_mesh(ONE, devices_of(ONE)))
    step, _, init = assemble(model, NextToken(), TX)

    def run(params, batch):
        state = init({path: jax.numpy.asarray(x) for path, x in params.items()})
        return {path: np.asarray(x) for path, x in step(state, batch)[0].params.items()}

    first = {path: np.asarray(x) for path, x in model.init(0).items()}
    return run, first


def test_one_step_of_sgd_at_each_site_is_data_parallel(stepper):
    run, first = stepper
    plan = Plan(FederateConfig(sites=2, rounds=3), OuterConfig(steps=1))
    state, whole = coordinator.init(plan, first), first
    for number in range(1, 4):
        # Rows of unlike lengths: a mean that is not by trained tokens would show.
        batch = random_batch(number, rows=8)
        parts = {"a": slice(0, 3), "b": slice(3, 8)}
        for site, rows in parts.items():
            own = jax.tree.map(lambda x, rows=rows: x[rows], batch)
            state = coordinator.offer(state, site)
            sent, _ = codec.encode(run(state.params, own), state.params, "float32")
            tokens = float(np.sum(own.loss_weight))
            update = Update(site, number, state.version, tokens, 1, 0, 1.0, sent)
            state, verdict = coordinator.receive(plan, state, update)
            assert verdict.kind == "accepted"
        state, _ = coordinator.apply(plan, state)
        whole = run(whole, batch)
        for path, x in whole.items():
            # Against the size of what was trained, not of a leaf that hardly moves.
            # A bias's gradient sums over more than 64 patches, here in another order: 2^-24 each.
            close(state.params[path], x, 64 * 2.0**-24, path, least=0.1)
    assert any(np.abs(whole[path] - x).max() > 1e-2 for path, x in first.items())
