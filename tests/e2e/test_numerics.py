"""bfloat16 compute, exact match against generation, buckets, and a run that can't go on."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from runs import recipe

import jaxvlm
from jaxvlm.data.conversations.dataset import make_dataset
from jaxvlm.data.sources import conversation_formats
from jaxvlm.inference.evaluator import Evaluator
from jaxvlm.train.loop import TrainingStopped
from jaxvlm.train.metrics import read_metrics


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    config = recipe(data)
    config.data.eval, config.steps, config.log_every = str(data), 150, 50
    config.optim.learning_rate, config.data.max_shift = 1e-2, 0
    # The highest loss is "best", so that the best checkpoint is not the newest.
    config.eval_every = 75
    config.checkpoint.metric, config.checkpoint.mode, config.checkpoint.keep = "loss", "max", 1
    # One device: eight of them share the cores, and wait for each other.
    run = jaxvlm.Trainer(config, tmp_path_factory.mktemp("trained"), jax.devices()[:1])
    result = run.fit()
    return run, result


def test_it_learns_and_the_blind_control_does_not(trained):
    _, result = trained
    assert result["exact_match"] > 0.95
    assert result["blind/exact_match"] < 0.8


def test_scored_exact_match_is_that_of_generated_answers(trained):
    run, _ = trained
    model = run.loaded()
    dataset = make_dataset(run.config, run.config.data.eval, run.tokenizer, run.image_format)
    records = dataset.records[:24]
    queries = [(record.images, record.turns[0].content) for record in records]
    answers = model.generate_batch(queries, max_new_tokens=8)
    generated = np.mean([a == r.turns[1].content for a, r in zip(answers, records, strict=True)])
    rows = Evaluator(run.model, dataset, 8)
    everything = rows.report({**run.state.params, **run.state.frozen}, blind=False).metrics
    assert generated == pytest.approx(everything["exact_match"], abs=0.05)
    if everything["exact_match"] == 1.0:
        assert generated == 1.0


def test_load_gives_the_same_answers(trained):
    run, _ = trained
    record = conversation_formats.read(run.config.data.train, run.config.data)[0][0]
    asked = (list(record.images), "which color is it?")
    assert jaxvlm.load(run.workdir).generate(*asked) == run.generate(*asked)


@pytest.mark.long
def test_bfloat16_compute_keeps_float32_parameters(data, tmp_path):
    config = recipe(data)
    config.model.dtype, config.steps = "bfloat16", 3
    run = jaxvlm.Trainer(config, tmp_path)
    run.fit()
    assert {str(x.dtype) for x in run.state.params.values()} == {"float32"}


def test_without_packing_rows_fall_into_buckets(data, tmp_path, capsys):
    config = recipe(data)
    config.data.packing, config.steps = False, 6
    jaxvlm.Trainer(config, tmp_path).fit()
    said = capsys.readouterr().err
    programs = said.count("compiled the step")
    assert 1 <= programs <= config.data.buckets, "a handful of programs, each announced"


def test_non_finite_steps_in_a_row_stop_the_run_with_advice(data, tmp_path):
    config = recipe(data)
    config.optim.learning_rate, config.optim.max_grad_norm = 1e30, 0.0
    config.max_bad_steps, config.steps = 3, 50
    with pytest.raises(TrainingStopped, match=r"3 steps in a row.*learning_rate"):
        jaxvlm.Trainer(config, tmp_path).fit()


def test_the_best_checkpoint_is_kept_and_loaded(trained):
    run, _ = trained
    lines = {line["step"]: line for line in read_metrics(run.workdir) if "eval/loss" in line}
    assert sorted(lines) == [75, 150]
    assert lines[75]["eval/loss"] > 1.01 * lines[150]["eval/loss"]
    for which, step in (("best", 75), ("latest", 150)):
        report = jaxvlm.load(run.workdir, which=which).evaluate(blind=False).metrics
        assert report["loss"] == pytest.approx(lines[step]["eval/loss"], rel=1e-4), which
