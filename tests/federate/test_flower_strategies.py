"""Our rules and outer optimizers against Flower's own strategies, in float64.

Where their hyper-parameters mean different things, Flower's are set to what ours do:

- FedAdam corrects the bias of round t as Adam does of round t + 1, and adds ``tau`` to the root of
  the second moment before it is corrected, where Adam adds eps after.
- FedYogi corrects no bias, and its moments start at 0, where Yogi's start at 1e-6.
- FedAdagrad adds ``tau`` to the root, and Adagrad eps below it: compared with both near 0.
- FedTrimmedAvg leaves out a share of the updates, and ours a number.
"""

from __future__ import annotations

import jax
import numpy as np
import pytest
from federate.flower_grid import FaultyGrid
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import strategy as flower

from jaxvlm.config import FederateConfig, OuterConfig
from jaxvlm.federate import aggregate
from jaxvlm.optim import outer

ROUNDS, SITES = 4, 7
SHAPES = {"a/w": (3, 4), "b/v": (5,)}
LR, B1, B2, EPS, MOMENTUM = 0.3, 0.9, 0.99, 1e-3, 0.8
BAR = 1e-6


def trained(params, site, version):
    """What a site makes of a version, f64."""
    draws = np.random.default_rng([site, version])
    return {p: 0.9 * x + draws.normal(0, 0.1, x.shape) for p, x in sorted(params.items())}


def tokens(site):
    return 10.0 + site


def theirs(strategy, at_round=None, first_round=1):
    """Versions that a strategy of Flower makes; ``at_round(strategy, t)`` sets it up, t from 1."""
    params = first()
    for t in range(1, ROUNDS + 1):
        if at_round:
            at_round(strategy, t)
        number = first_round + t - 1

        def train(message, t=t):
            arrays = {p: x.numpy() for p, x in message.content["arrays"].items()}
            node = message.metadata.dst_node_id
            new = trained(arrays, node, t)
            content = {
                "arrays": ArrayRecord({p: Array(x) for p, x in new.items()}),
                "metrics": MetricRecord({"num-examples": tokens(node), "one": 1.0}),
            }
            return Message(RecordDict(content), reply_to=message)

        grid = FaultyGrid(dict.fromkeys(range(SITES), train))
        record = ArrayRecord({p: Array(x) for p, x in params.items()})
        messages = strategy.configure_train(number, record, ConfigRecord(), grid)
        replies = grid.pull_messages(grid.push_messages(messages))
        arrays, _ = strategy.aggregate_train(number, replies)
        params = {p: x.numpy() for p, x in arrays.items()}
        yield params


def ours(outer_config, **federate):
    """Versions that a coordinator with these settings makes, in float64."""
    federate = FederateConfig(sites=SITES, **federate)
    with jax.enable_x64(True):
        params = first()
        tx = outer.make_outer_optimizer(outer_config)
        state = tx.init(params)
        for t in range(1, ROUNDS + 1):
            new = [trained(params, site, t) for site in range(SITES)]
            deltas = [{p: (x[p] - params[p], None) for p in params} for x in new]
            used = aggregate.chosen(federate, deltas)
            mean = {
                p: aggregate.combine(
                    federate,
                    params[p],
                    [deltas[i][p] for i in used],
                    [tokens(i) for i in used],
                    [1.0] * len(used),
                )
                for p in params
            }
            params, state = outer.outer_update(outer_config, tx, params, mean, state)
            params = {p: np.asarray(x) for p, x in params.items()}
            yield params


def first():
    draws = np.random.default_rng(0)
    return {p: draws.normal(0, 1, shape) for p, shape in SHAPES.items()}


def assert_same(a, b):
    rounds = 0
    for ours_now, theirs_now in zip(a, b, strict=True):
        for path in SHAPES:
            assert ours_now[path].dtype == np.float64
            np.testing.assert_allclose(ours_now[path], theirs_now[path], rtol=BAR, atol=BAR)
        rounds += 1
    assert rounds == ROUNDS


def bias(t, beta):
    return 1 - beta**t


def adam(strategy, t):
    strategy.tau = EPS * np.sqrt(bias(t, B2))


def yogi(strategy, t):
    strategy.tau = EPS * np.sqrt(bias(t, B2))
    strategy.eta = LR * np.sqrt(bias(t, B2)) / bias(t, B1)
    if t == 1:
        strategy.m_t = {p: np.full(s, -1e-6) for p, s in SHAPES.items()}  # of minus the gradient
        strategy.v_t = {p: np.full(s, 1e-6) for p, s in SHAPES.items()}


ADAPTIVE = {"learning_rate": LR, "b1": B1, "b2": B2, "eps": EPS}
CASES = {
    "FedAvg": ({}, {}, lambda: theirs(flower.FedAvg())),
    "FedAvgM": (
        {"momentum": MOMENTUM, "learning_rate": LR},
        {},
        lambda: theirs(flower.FedAvgM(server_learning_rate=LR, server_momentum=MOMENTUM)),
    ),
    "FedAdam": (
        {"optimizer": "adam", **ADAPTIVE},
        {},
        lambda: theirs(flower.FedAdam(eta=LR, beta_1=B1, beta_2=B2), adam, first_round=0),
    ),
    "FedYogi": (
        {"optimizer": "yogi", **ADAPTIVE},
        {},
        lambda: theirs(flower.FedYogi(beta_1=B1, beta_2=B2), yogi),
    ),
    "FedAdagrad": (
        {"optimizer": "adagrad", "learning_rate": LR, "eps": 1e-30},
        {},
        lambda: theirs(flower.FedAdagrad(eta=LR, tau=1e-15)),
    ),
    "FedMedian": ({}, {"aggregator": "median"}, lambda: theirs(flower.FedMedian())),
    "FedTrimmedAvg": (
        {},
        {"aggregator": "trimmed_mean", "byzantine": 2},
        lambda: theirs(flower.FedTrimmedAvg(beta=2 / SITES + 1e-9)),
    ),
    "Krum": (
        {},
        {"aggregator": "krum", "byzantine": 2},
        lambda: theirs(flower.Krum(num_malicious_nodes=2)),
    ),
    "MultiKrum": (
        {},
        {"aggregator": "multi_krum", "byzantine": 2},
        lambda: theirs(
            flower.MultiKrum(num_malicious_nodes=2, num_nodes_to_select=3, weighted_by_key="one")
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_versions_are_those_of_flowers_strategy(name):
    outer_settings, federate, flowers = CASES[name]
    assert_same(ours(OuterConfig(**outer_settings), **federate), flowers())
