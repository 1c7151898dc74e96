"""What a run's evaluations count as better, and that processes evaluate the same data."""

import dataclasses
from unittest import mock

import pytest
from runs import recipe

import jaxvlm
from jaxvlm.config import Config
from jaxvlm.inference.evaluator import Report
from jaxvlm.train.callbacks import CheckpointRecord
from jaxvlm.train.metrics import MetricWriter
from jaxvlm.train.progress import Progress
from jaxvlm.trainer.callbacks import evaluation
from jaxvlm.trainer.callbacks.evaluation import EvaluationCallback
from jaxvlm.types import TrainState


def callback(scores, extra=None, lines=None, eval="questions.jsonl", **checkpoint):
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
    return EvaluationCallback(evaluate, config, 100, writer, progress, extra or {})


STATE = mock.Mock(spec=TrainState)


@pytest.mark.parametrize("score", [float("nan"), float("inf"), -float("inf")])
def test_no_number_is_never_the_best(score):
    run = callback([score, 0.25, score, 0.5])
    assert not run.on_evaluate(1, STATE) and run.best is None and run.not_better == 1
    assert not run.on_evaluate(2, STATE) and run.best == 0.25 and run.not_better == 0
    assert not run.on_evaluate(3, STATE) and run.best == 0.25
    assert not run.on_evaluate(4, STATE) and run.best == 0.5


@pytest.mark.parametrize("change", [{"metric": "loss"}, {"mode": "min"}, {"eval": "others.jsonl"}])
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
    old = {name: value for name, value in record.extra.items() if name != "best_of"}
    assert callback([], old, lines, **change).best == 0.75, "states of before do not say"


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
