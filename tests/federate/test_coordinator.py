"""The coordinator's decisions, and theorem T6 under drawn schedules, against a model in Python."""

import dataclasses

import numpy as np
import pytest
from fake_sites import FIRST, same, trained
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxvlm.config import FederateConfig, OuterConfig
from jaxvlm.federate import codec, coordinator
from jaxvlm.federate.coordinator import Plan
from jaxvlm.federate.messages import Update

ASYNC = FederateConfig(sites=3, rounds=100, buffer=2, max_staleness=2)


TWO = FederateConfig(sites=2, rounds=9)
FEDAVG = OuterConfig()


def plan_of(federate=TWO, outer=FEDAVG, **more):
    return Plan(federate, outer, **more)


def update_of(site, number, base, params, tokens=100.0, dtype="float32"):
    parts, _ = codec.encode(trained(site, base, params), params, dtype)
    return Update(site, number, base, tokens, 4, 0, 1.0, parts)


def after(plan, state, *updates):
    for update in updates:
        state = coordinator.offer(state, update.site)
        state, verdict = coordinator.receive(plan, state, update)
        assert verdict.kind == "accepted", verdict
    return state


def test_a_round_is_the_mean_by_tokens_in_any_order():
    plan = plan_of()
    start = coordinator.init(plan, FIRST)
    a = update_of("a", 1, 0, FIRST, tokens=100.0)
    b = update_of("b", 1, 0, FIRST, tokens=300.0)
    one, applied = coordinator.apply(plan, after(plan, start, a, b))
    other, _ = coordinator.apply(plan, after(plan, start, b, a))
    assert same(one.params, other.params) and one.version == 1 and not one.buffer
    assert applied.weights == [0.25, 0.75] and applied.sites == ["a", "b"]
    for path, x in one.params.items():
        parts = [np.float64(trained(site, 0, FIRST)[path]) for site in "ab"]
        assert np.array_equal(x, (parts[0] / 4 + parts[1] * 3 / 4).astype(np.float32))


def test_one_site_gets_its_own_weights_back():
    plan = plan_of(FederateConfig(sites=1, rounds=9))
    state, _ = coordinator.apply(
        plan, after(plan, coordinator.init(plan, FIRST), update_of("a", 1, 0, FIRST))
    )
    assert same(state.params, trained("a", 0, FIRST))


@pytest.mark.parametrize(
    "changed, kind, why",
    [
        ({"number": 0}, "duplicate", "judged before"),
        ({"base": 3}, "bad", "was given none after 0"),
        ({"token_lag": 3}, "bad", "bound of a's cache is 2"),
        ({"tokens": float("nan")}, "bad", "not finite"),
        ({"tokens": 0.0}, "bad", "0 tokens"),
        ({"steps": 0}, "bad", "0 steps"),
        ({"tokens": 1.7e308}, "bad", "1.7e+308 tokens"),
        ({"base": -1}, "bad", "was given"),
        ({"loss": float("inf")}, "bad", "not finite"),
    ],
)
def test_what_an_update_says_of_itself_is_judged(changed, kind, why):
    plan = plan_of(token_bounds={"a": 2})
    state = coordinator.offer(coordinator.init(plan, FIRST), "a")
    update = dataclasses.replace(update_of("a", 1, 0, FIRST), **changed)
    new, verdict = coordinator.receive(plan, state, update)
    assert verdict.kind == kind and why in verdict.why
    assert not new.buffer and same(new.params, FIRST)


@pytest.mark.parametrize(
    "damage, why",
    [
        (lambda parts: parts.pop("vision/w"), "vision/w is missing"),
        (lambda parts: parts.update(extra=np.zeros(3, np.float32)), "extra is no part"),
        (lambda parts: parts.update({"decoder/b": np.zeros(4, np.float32)}), "does not fit"),
        (
            lambda parts: parts.update({"decoder/b": np.full(3, np.nan, np.float32)}),
            "decoder/b has a value that is not finite",
        ),
        (
            lambda parts: parts.update(
                {
                    "decoder/b:index": np.array([77], np.uint32),
                    "decoder/b:rest": np.ones(1, np.float32),
                }
            ),
            "out of range",
        ),
    ],
)
def test_damaged_updates_are_named(damage, why):
    plan = plan_of()
    state = coordinator.offer(coordinator.init(plan, FIRST), "a")
    update = update_of("a", 1, 0, FIRST)
    damage(update.parts)
    new, verdict = coordinator.receive(plan, state, update)
    assert verdict.kind == "bad" and why in verdict.why and not new.buffer


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4"])
def test_rounded_updates_are_applied_as_they_were_sent(dtype):
    plan = plan_of(FederateConfig(sites=1, rounds=9), OuterConfig(delta_dtype=dtype))
    update = update_of("a", 1, 0, FIRST, dtype=dtype)
    state, _ = coordinator.apply(plan, after(plan, coordinator.init(plan, FIRST), update))
    for path, x in state.params.items():
        sent = np.float64(codec.decode(path, update.parts, x.shape, dtype)[0])
        assert np.array_equal(x, (FIRST[path] + sent).astype(np.float32))
    state = coordinator.offer(state, "a")
    for other in {"float32", "bfloat16", "int8", "int4"} - {dtype}:
        verdict = coordinator.judge(plan, state, update_of("a", 2, 1, FIRST, dtype=other))
        assert verdict.kind == "bad", other


def test_late_updates_weigh_less_and_then_nothing():
    plan = plan_of(ASYNC)
    state = coordinator.init(plan, FIRST)
    for site in "abc":
        state = coordinator.offer(state, site)
    slow = update_of("c", 1, 0, FIRST)
    for version in range(2):
        updates = [update_of(s, version + 1, version, state.params) for s in "ab"]
        state, _ = coordinator.apply(plan, after(plan, state, *updates))
    held, verdict = coordinator.receive(plan, state, slow)
    assert verdict.kind == "accepted" and held.buffer[0].lag == 2
    fresh = update_of("a", 3, 2, state.params)
    new, applied = coordinator.apply(plan, after(plan, held, fresh))
    weights = np.array([1.0, 3**-0.5])
    np.testing.assert_allclose(applied.weights, weights / weights.sum(), rtol=1e-12)
    for path, x in new.params.items():
        base = np.float64(state.params[path])
        moved = [
            np.float64(codec.decode(path, u.parts, x.shape, "float32")[0]) for u in (fresh, slow)
        ]
        wanted = base + np.average(moved, axis=0, weights=weights)
        np.testing.assert_allclose(x, wanted, atol=2**-22)
    _, verdict = coordinator.receive(plan, new, dataclasses.replace(slow, site="b", number=9))
    assert verdict.kind == "late" and "3 outer updates ago" in verdict.why


def test_clipping_scales_whole_updates():
    federate = FederateConfig(sites=2, rounds=9, max_delta_norm=0.05, weighting="uniform")
    plan = plan_of(federate)
    updates = [update_of(s, 1, 0, FIRST) for s in "ab"]
    state = after(plan, coordinator.init(plan, FIRST), *updates)
    new, applied = coordinator.apply(plan, state)
    assert applied.clipped == 2 and min(applied.norms) > 0.05
    for path, x in new.params.items():
        each = [np.float64(trained(s, 0, FIRST)[path]) - FIRST[path] for s in "ab"]
        scaled = [d * 0.05 / n for d, n in zip(each, applied.norms)]
        np.testing.assert_allclose(x, FIRST[path] + np.mean(scaled, axis=0), atol=1e-7)


def test_a_version_that_is_not_finite_is_not_made():
    first = {"w": np.full(3, 3e38, np.float32)}
    plan = plan_of()
    state = coordinator.init(plan, first)
    for site in "ab":
        state = coordinator.offer(state, site)
        update = Update(site, 1, 0, 100.0, 4, 0, 1.0, {"w": np.full(3, 3e38, np.float32)})
        state, verdict = coordinator.receive(plan, state, update)
        assert verdict.kind == "accepted"
    new, applied = coordinator.apply(plan, state)
    assert not applied.finite and new.version == 0 and not new.buffer
    assert same(new.params, first)


def test_noise_is_of_the_updates_too():
    federate = FederateConfig(
        sites=2, rounds=9, weighting="uniform", max_delta_norm=1.0, noise_multiplier=1.0
    )
    plan, made = plan_of(federate), []
    for number in (1, 1, 2):
        state = coordinator.init(plan, FIRST)
        updates = [update_of(s, number, 0, FIRST, tokens=float(number)) for s in "ab"]
        if number == 2:
            updates[0].parts["decoder/b"] = updates[0].parts["decoder/b"] * np.float32(1 + 2**-20)
        made.append(coordinator.apply(plan, after(plan, state, *updates), b"secret")[0].params)
    assert same(made[0], made[1])
    assert np.abs(made[2]["vision/w"] - made[0]["vision/w"]).max() > 0.05  # other draws


def test_a_site_has_one_place_in_a_synchronous_round():
    plan = plan_of()
    state = after(plan, coordinator.init(plan, FIRST), update_of("a", 1, 0, FIRST))
    state, verdict = coordinator.receive(plan, state, update_of("a", 2, 0, FIRST))
    assert verdict.kind == "duplicate" and len(state.buffer) == 1


def test_a_deadline_goes_on_without_the_missing():
    plan = plan_of(FederateConfig(sites=3, rounds=9, min_sites=2, deadline_s=60.0))
    state = coordinator.init(plan, FIRST)
    for site in "abc":
        state = coordinator.offer(state, site)
    state = after(plan, state, update_of("a", 1, 0, FIRST))
    assert not coordinator.is_due(plan, state, 61.0)  # one is not enough
    state = after(plan, state, update_of("b", 1, 0, FIRST))
    assert not coordinator.is_due(plan, state, 59.0) and coordinator.is_due(plan, state, 61.0)
    assert coordinator.left_out(state) == ["c"]


KINDS = ["train", "send", "resend", "stale", "lose", "old tokens"]
STEPS = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(KINDS)), max_size=60)
BUGS = ("none", "version", "lag", "restart", "duplicate", "tokens")


class Model:
    """Sites and coordinator under a schedule, and what must hold after each of its steps."""

    def __init__(self, bug="none"):
        self.bug = bug
        self.plan = plan_of(ASYNC, token_bounds=dict.fromkeys("abc", 1))
        self.state = coordinator.init(self.plan, FIRST)
        self.saved = self.state
        self.made = [0]  # outer updates so far; the coordinator may forget, this does not
        self.base, self.held, self.number = {}, {}, dict.fromkeys("abc", 0)
        self.sent = []
        self.accepted = []

    def step(self, site, what):
        if self.bug == "restart" and what == "old tokens":
            self.state = self.saved  # a restart that has forgotten a version
        if what == "lose":  # the site's update on the way, and what it was given
            self.held.pop(site, None)
        elif what == "train":
            self.state = coordinator.offer(self.state, site)
            self.base[site], self.held[site] = self.state.version, self.state.params
        elif what in ("send", "old tokens") and site in self.held:
            self.number[site] += 1
            update = update_of(site, self.number[site], self.base[site], self.held[site])
            update = dataclasses.replace(update, token_lag=2 if what == "old tokens" else 1)
            self.sent.append((update, self.made[-1]))
            self.receive(update)
        elif what == "resend" and self.sent:
            self.receive(self.sent[-1][0])
        elif what == "stale" and self.sent:
            self.receive(self.sent[0][0])
        if self.bug != "restart":
            self.saved = self.state

    def receive(self, update):
        plan = self.plan
        if self.bug == "lag":
            federate = dataclasses.replace(ASYNC, max_staleness=ASYNC.max_staleness + 1)
            plan = dataclasses.replace(plan, federate=federate)
        state = self.state
        if self.bug == "tokens":
            plan = dataclasses.replace(plan, token_bounds=dict.fromkeys("abc", 2))
        if self.bug == "duplicate":
            sites = {s: dataclasses.replace(r, number=0) for s, r in state.sites.items()}
            state = state._replace(sites=sites)
        self.state, verdict = coordinator.receive(plan, state, update)
        if verdict.kind == "accepted":
            # T6: by a count that no coordinator keeps.
            lag = self.made[-1] - update.base
            assert lag <= ASYNC.max_staleness, "an update older than its bound was accepted"
            assert update.token_lag <= 1, "an update of tokens older than their bound was accepted"
            key = (update.site, update.number)
            assert key not in self.accepted, "an update was accepted twice"
            self.accepted.append(key)
        if coordinator.is_due(self.plan, self.state):
            new, _ = coordinator.apply(self.plan, self.state)
            if self.bug == "version":
                new = new._replace(version=self.state.version)
            self.made.append(self.made[-1] + 1)
            self.state = new
            if self.bug == "restart" and self.made[-1] % 2:
                self.saved = self.state


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_no_accepted_update_is_older_than_its_bound(steps):
    model = Model()
    for site, what in steps:
        model.step(site, what)
    assert model.state.version == model.made[-1]


@pytest.mark.parametrize("bug", BUGS[1:])
def test_planted_bugs_are_caught(bug):
    draws = np.random.default_rng(0)
    for _ in range(400):
        model = Model(bug)
        try:
            for _ in range(60):
                what = draws.choice(KINDS, p=[0.3, 0.3, 0.1, 0.1, 0.1, 0.1])
                model.step(draws.choice(list("abc")), what)
            assert model.state.version == model.made[-1]
        except AssertionError:
            return
    raise AssertionError(f"the planted bug {bug!r} was not caught")
