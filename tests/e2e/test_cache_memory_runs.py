"""Runs that are short of memory go on with fewer pages, and have them back."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from runs import losses
from test_cache import made, metric

import jaxvlm
from jaxvlm.config import ConfigError
from jaxvlm.inference.evaluator import Evaluator

ONE = {"devices": jax.devices()[:1]}
OUT_OF_MEMORY = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")


def settings(data, **cache):
    config = made(data, "strict", encode_batch=2, **cache)
    config.data.eval, config.eval_every, config.steps = config.data.train, 6, 18
    config.checkpoint.every = 0
    return config


class Tight:
    """A step's program that fails where a device has no room for so many pages."""

    def __init__(self, program, most):
        self.program, self.most, self.calls = program, most, []

    def __call__(self, state, batch):
        count = state.cache.pages.shape[0]
        self.calls.append(count)
        if len(self.calls) > 3 and count > self.most[0]:
            raise OUT_OF_MEMORY
        return self.program(state, batch)

    def __getattr__(self, name):
        return getattr(self.program, name)


@pytest.mark.long
def test_a_step_that_is_short_of_memory(data, tmp_path, monkeypatch, capsys):
    """From the fourth step on; and after the evaluation there is room again."""
    run = jaxvlm.Trainer(settings(data, min_pages_fraction=0.25), tmp_path / "run", **ONE)
    programs, most, all_pages = run.training.step, [1], run.pages.count
    build, calls = programs.build, []

    def tight(state, batch):
        tight = Tight(build(state, batch), most)
        tight.calls = calls
        return tight

    programs.build = tight
    found, report = [], Evaluator.report

    def roomy(self, *args):
        most[0] = all_pages
        found.append(len(programs.compiled))
        return report(self, *args)

    most[0] = all_pages // 4
    monkeypatch.setattr(Evaluator, "report", roomy)
    run.fit()
    said = "".join(capsys.readouterr())
    assert calls[:3] == [all_pages] * 3
    assert calls[3:6] == [all_pages, all_pages // 2, all_pages // 4]
    assert calls[6:8] == [all_pages // 4] * 2
    assert calls[8] == all_pages // 2 and calls[14] == all_pages  # after the next evaluations
    assert set(found) == {3} == {len(programs.compiled)}, "compiled at the start, and never again"
    assert said.count("compiled the step") == 1 and "1/4 of its pages" in said
    plain = jaxvlm.Trainer(settings(data), tmp_path / "plain", **ONE)
    plain.fit()  # arrays of other sizes: the same to rounding
    np.testing.assert_allclose(
        list(losses(run.workdir).values()), list(losses(plain.workdir).values()), rtol=1e-5
    )
    assert metric(run, "train/cache/hit_rate")[-1] == 1


@pytest.mark.long
@pytest.mark.parametrize("asked", [True, False])
def test_an_evaluation_has_the_memory(data, tmp_path, monkeypatch, capsys, asked):
    """As it is asked for, or because there was too little."""
    run = jaxvlm.Trainer(settings(data, evict_for_eval=asked), tmp_path / "run", **ONE)
    report, shape = Evaluator.report, run.training.abstract.cache.pages.shape
    others = jax.live_arrays()  # of tests before this one, which may be of the shape too

    def tight(self, *args):
        own = (x for x in jax.live_arrays() if all(x is not other for other in others))
        if any(x.shape == shape for x in own):
            raise OUT_OF_MEMORY
        return report(self, *args)

    monkeypatch.setattr(Evaluator, "report", tight)
    assert run.fit()["ended"] == "done"
    found = metric(run, "train/cache/hit_rate")
    assert found[6] == 0 and found[5] == 1 and found[-1] == 1, "tokens are recomputed"
    assert ("short of memory" in "".join(capsys.readouterr())) != asked
    assert not run.state.cache.pages.is_deleted()


@pytest.mark.parametrize(
    "cache, words",
    [
        ({"min_pages_fraction": 2.0**-40}, "min_pages_fraction=.*: .* can't be halved so often"),
        ({"min_pages_fraction": 0.3}, r"min_pages_fraction=0\.3: .*; the nearest is 0\.25"),
        (
            {"min_pages_fraction": 0.5, "policy": "off", "encode_batch": 0},
            "min_pages_fraction=0.5 is not read without a policy",
        ),
        ({"evict_for_eval": True}, r"is not read without config\.data\.eval"),
    ],
)
def test_refused(data, cache, words):
    config = made(data, cache.pop("policy", "strict"), **cache)
    with pytest.raises(ConfigError, match=words):
        jaxvlm.Trainer(config, **ONE)
