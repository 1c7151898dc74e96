"""What a run's evaluations count as better, and that processes evaluate the same data."""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from runs import recipe

import jaxvlm
from jaxvlm.checkpoint.checkpointer import Checkpointer
from jaxvlm.checkpoint.manifest import Score, comparable
from jaxvlm.config import Config
from jaxvlm.inference.evaluator import Report
from jaxvlm.train.callbacks import CheckpointRecord
from jaxvlm.train.metrics import MetricWriter
from jaxvlm.train.progress import Progress
from jaxvlm.trainer.callbacks import evaluation
from jaxvlm.trainer.callbacks.evaluation import EvaluationCallback
from jaxvlm.types import TrainState


def callback(scores, extra=None, lines=None, eval="questions.jsonl", records="a", **checkpoint):
    config, given = Config(early_stop=2), {"metric": "accuracy", "mode": "max"} | checkpoint
    config = dataclasses.replace(
        config,
        checkpoint=dataclasses.replace(config.checkpoint, **given),
        data=dataclasses.replace(config.data, eval=eval),
    )
    reports = iter(scores)

    def evaluate(state, blind):
        value = next(reports)
        return Report({"accuracy": value, "loss": value}, {}, 1.0, ("a table",))

    progress = mock.Mock(spec=Progress)
    progress.log.side_effect = None if lines is None else lines.append
    writer = mock.Mock(spec=MetricWriter)
    return EvaluationCallback(evaluate, config, 100, writer, progress, extra or {}, records)


STATE = mock.Mock(spec=TrainState)


@pytest.mark.parametrize("score", [float("nan"), float("inf"), -float("inf")])
def test_no_number_is_never_the_best(score):
    run = callback([score, 0.25, score, 0.5])
    assert not run.on_evaluate(1, STATE) and run.best is None and run.not_better == 1
    assert not run.on_evaluate(2, STATE) and run.best == 0.25 and run.not_better == 0
    assert not run.on_evaluate(3, STATE) and run.best == 0.25
    assert not run.on_evaluate(4, STATE) and run.best == 0.5


@pytest.mark.parametrize(
    "change",
    [{"metric": "loss"}, {"mode": "min"}, {"eval": "others.jsonl"}, {"records": "b"}],
)
def test_the_best_of_another_score_is_forgotten(change):
    first, record, lines = callback([0.75]), CheckpointRecord({}, {}), []
    first.on_evaluate(1, STATE)
    first.on_save(1, STATE, record)
    went_on = []
    same = callback([0.5] * 3, record.extra, went_on)  # the last with its control
    assert same.best == 0.75 and not went_on
    assert not same.on_evaluate(2, STATE) and same.on_evaluate(3, STATE), "early stop goes on"
    other = callback([0.5], record.extra, lines, **change)
    assert other.best is None and other.not_better == 0
    assert len(lines) == 1 and "starts anew" in lines[0] and "max of accuracy" in lines[0]
    assert lines[0].endswith("has other records") == ("records" in change)
    old = {name: value for name, value in record.extra.items() if name != "best_of"}
    assert callback([], old, lines, **change).best == 0.75, "states of before do not say"
    path_alone = record.extra | {"best_of": record.extra["best_of"][:3]}
    assert callback([], path_alone, [], records="b").best == 0.75


@pytest.mark.long
def test_records_of_one_name_and_other_content_begin_anew(data, tmp_path, capfd):
    """The best checkpoint too is of the same records, in the run and for what loads it."""
    records = data.read_text().splitlines(keepends=True)
    path = data.parent / "changing.jsonl"
    config = recipe(data)
    config.data.eval, config.eval_every, config.optim.warmup_steps = str(path), 2, 0
    config.checkpoint.metric, config.checkpoint.mode, config.checkpoint.every = "loss", "min", 0
    path.write_text("".join(records[:8]))
    bests = []
    for config.steps, part in ((2, records[:8]), (4, records[:8]), (6, records[8:24])):
        path.write_text("".join(part))
        capfd.readouterr()
        jaxvlm.Trainer(config, tmp_path / "run", jax.devices()[:1]).fit()
        said = "".join(capfd.readouterr())
        bests.append("starts anew" in said)
    assert bests == [False, False, True] and f"on {path}, which has other records" in said


@pytest.mark.parametrize("better", [0.9, 0.1])
def test_the_best_checkpoint_is_of_the_newest_evaluation_data(tmp_path, better):
    def save(checkpointer, step, score, data):
        extra = {"best_of": ["score", "max", *data]} if data else {}
        checkpointer.save(step, {"x": jnp.full(3, float(step))}, extra, {"score": score})
        checkpointer.wait()

    with Checkpointer(tmp_path / "run", keep=1, metric="score", mode="max") as checkpointer:
        for step, score in ((1, 0.5), (2, 0.95), (3, 0.6)):
            save(checkpointer, step, score, ["file", "a"])
        assert checkpointer.all_steps() == [2, 3]
        save(checkpointer, 4, better, ["file", "b"])
        save(checkpointer, 5, 0.5, ["file", "b"])
        assert checkpointer.all_steps() == ([4, 5] if better > 0.5 else [5])
    with Checkpointer(tmp_path / "run", keep=1, metric="score", mode="max") as again:
        assert again._best(again.all_steps()) == (4 if better > 0.5 else 5)
    scored = {1: Score(0.9, []), 2: Score(0.8, ["file"]), 3: Score(0.1, ["file", "b"])}
    assert comparable(scored) == {1: 0.9, 2: 0.8, 3: 0.1}, "older ones do not say"
    assert comparable({}) == {} and comparable(scored | {4: Score(0.2, ["other", "b"])}) == {
        1: 0.9,
        4: 0.2,
    }


def test_processes_compare_the_evaluation_data(data, monkeypatch):
    records, found = data.read_text().splitlines(keepends=True), []
    for name, part in (("one", records[:8]), ("same", records[:8]), ("other", records[1:9])):
        path = data.parent / f"evaluated-{name}{data.suffix}"
        path.write_text("".join(part))
        config = recipe(data)
        config.data.eval = str(path)
        run = jaxvlm.Trainer(config)
        monkeypatch.setattr(evaluation.processes, "check_same", lambda *given: found.append(given))
        evaluation.make_evaluator(run)
        monkeypatch.undo()
    (name, one), (_, same), (_, other) = found
    assert "evaluation data" in name and one == same != other
