"""``jaxvlm sweep``: everything is checked before the first trial starts; state and table."""

from __future__ import annotations

import csv
import json
import pathlib
import sys

import pytest

from jaxvlm.cli.main import run
from jaxvlm.config import Config
from jaxvlm.sweep import definition, local, sweep, table, trial
from tests.sweep import driver, stub

ROOT = pathlib.Path(__file__).resolve().parents[2]
RECIPE = f"--config={ROOT / 'configs' / 'quickstart.py'}:smoke"


def says(capsys, *argv: str, code: int = 0) -> tuple[str, dict]:
    """What a command prints for people, and its JSON."""
    assert run(["sweep", *argv, "--json"]) == code
    *lines, last = capsys.readouterr().out.strip().split("\n")
    return "\n".join(lines), json.loads(last)


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ([], "sweep needs a recipe: --config=FILE"),
        ([RECIPE], "a sweep varies settings"),
        ([RECIPE, "--grid=seed=0", "--grid=seed=1"], "seed is given twice"),
        ([RECIPE, "--grid=optim.learning_rat=1,2"], "did you mean 'learning_rate'?"),
        ([RECIPE, "--grid=seed=0,x"], "the trial seed=x: flag --config.seed=x"),
        ([RECIPE, "--grid=seed=0,0"], "asked for twice"),
        ([RECIPE, "--grid=optim=1"], "it is a group of settings"),
        ([RECIPE, "--grid=optim={'b1':0.8},{'b1':0.9}"], "vary its settings one by one"),
        ([RECIPE, "--grid=optm.b1=1"], "did you mean 'optim'?"),
        ([RECIPE, "--grid=checkpoint.mode=max,best"], "config.checkpoint.mode='best'; known"),
        ([RECIPE, "--grid=data.buckets=1,2"], "is not read without packing=False"),
        ([RECIPE, "--grid=optim.learning_rate=-1"], "must be at least 0"),
        ([RECIPE, "--config.seed=1", "--grid=seed=0,1"], "leave one out"),
        ([RECIPE, "--grid=seed=0,1", "--parallel=0"], "--parallel=0: must be at least 1"),
        ([RECIPE, "--grid=seed=0,1", "--mode=best"], "--mode='best'; known: max, min"),
        ([RECIPE, "--grid=seed=0", "--devices=0,1;1"], "lists that share no device"),
        ([RECIPE, "--grid=seed=0", "--devices=0;1", "--parallel=3"], "--devices has 2 lists"),
        (["--config=nope.py", "--grid=seed=0"], "no such recipe"),
        (["stauts"], "usage: jaxvlm sweep"),
        (["status"], "holds no sweep"),
        (["table", "--grid=seed=0"], "sweep table takes no --grid"),
        (["resume", RECIPE], "sweep resume takes no --config"),
    ],
)
def test_nothing_starts_where_something_can_not_be(capsys, tmp_path, monkeypatch, argv, line):
    monkeypatch.setattr(local.Local, "start", None)
    assert run(["sweep", *argv, f"--workdir={tmp_path / 's'}"]) == 2
    error = capsys.readouterr().err.strip()
    assert line in error and len(error.splitlines()) == 1, error
    assert not (tmp_path / "s").exists()


def test_a_trial_is_an_ordinary_run(tmp_path):
    row = definition.Row("", {"seed": "3", "optim.frozen": "('vision/*',)"})
    made = trial.make_trial(tmp_path, row, Config(steps=3))
    command = local.train_command("recipe.py:arg", {"epochs": "1.0", "seed": "2"})(made)
    assert command == [
        *(sys.executable, "-m", "jaxvlm", "train", "--config=recipe.py:arg"),
        *(f"--workdir={tmp_path / made.id}", "--json", "--config.epochs=1.0", "--config.seed=3"),
        "--config.optim.frozen=('vision/*',)",
    ]


@pytest.fixture
def trained(tmp_path):
    """A sweep of stubs, one of which failed."""
    grid = f"optim.learning_rate=0.02,{stub.FAILS},0.01"
    driver.run(tmp_path / "s", grid, "seed=0,1", parallel=6, say=lambda line: None)
    return tmp_path / "s"


def test_status_and_table_are_told_in_text_json_csv_and_a_plot(capsys, trained):
    text, status = says(capsys, "status", f"--workdir={trained}")
    assert text.startswith("6 trials of 10: 4 done, 2 failed")
    assert status["counts"] == {"done": 4, "failed": 2}
    text, made = says(capsys, "table", f"--workdir={trained}")
    assert [g["settings"]["optim.learning_rate"] for g in made["groups"]] == ["0.02", "0.01", "0.5"]
    best = made["groups"][0]
    scores = [stub.score(0.02, seed) for seed in (0, 1)]
    assert best["mean"] == pytest.approx(sum(scores) / 2) and best["n"] == 2
    assert best["std"] == pytest.approx(abs(scores[0] - scores[1]) / 2**0.5)
    assert text.splitlines()[0] == "the highest exact_match first; std over seeds, n - 1"
    assert text.count("no such file") == 2 and " 0/2" in text
    rows = list(csv.DictReader((trained / table.CSV).open(newline="").readlines()))
    assert [float(row["exact_match"] or 0) for row in rows] == [
        *(g["mean"] or 0 for g in made["groups"]),
    ]
    assert (trained / table.PLOT).read_bytes().startswith(b"\x89PNG")
    text, lowest = says(capsys, "table", f"--workdir={trained}", "--mode=min")
    assert [g["mean"] for g in lowest["groups"][:2]] == [g["mean"] for g in made["groups"][1::-1]]
    text, by_loss = says(
        capsys, "table", f"--workdir={trained}", "--metric=train/loss", "--mode=min"
    )
    assert by_loss["groups"][0]["mean"] == 1 / stub.STEPS
    assert run(["sweep", "table", f"--workdir={trained}", "--metric=f1"]) == 2
    assert "--metric can be exact_match, train/loss" in capsys.readouterr().err


def test_a_plot_needs_matplotlib_and_a_table_does_not(trained, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    made = table.make_table(trained)
    assert "jaxvlm[sweep]" in table.write_plot(made, trained / "x.png")
    assert not (trained / "x.png").exists()


def test_an_ablation_names_its_factors(tmp_path):
    file = tmp_path / "factors.json"
    file.write_text('{"fast": {"optim.learning_rate": 0.05}, "off": {"optim.learning_rate": 0.5}}')
    rows = definition.read_rows(["seed=0,1"], ablation=str(file))
    recipe = {"optim.learning_rate": "0.001"}
    rows = [definition.Row(row.factor, recipe | row.overrides) for row in rows]
    asked = sweep.Definition("10", {}, rows, parallel=6)
    asked = sweep.resolved(tmp_path / "s", asked, driver.resolve)
    sweep.run_sweep(tmp_path / "s", asked, lambda line: None, driver.command, poll_s=0.01)
    made = table.make_table(tmp_path / "s")
    assert [group.name for group in made.groups] == ["fast", "base", "off"]
    assert "off" in table.as_text_lines(made).splitlines()[4]


def test_a_sweep_is_resumed_without_its_flags(capsys, tmp_path, monkeypatch):
    """The definition is in the folder; here the trials are stubs."""
    monkeypatch.setattr(local, "train_command", lambda recipe, overrides: driver.command)
    monkeypatch.chdir(ROOT)
    argv = [RECIPE, f"--workdir={tmp_path / 's'}", "--config.steps=20"]
    argv += ["--grid=optim.learning_rate=0.5,0.01", "--config.optim.frozen=('vision/*',)"]
    text, result = says(capsys, *argv, "--parallel=2", code=1)
    assert result["counts"] == {"done": 1, "failed": 1} and "no such file" in text
    before = sweep.read_definition(tmp_path / "s")
    assert before.overrides == {"steps": "20", "optim.frozen": "('vision/*',)"}
    assert before.parallel == 2 and (before.metric, before.mode) == ("exact_match", "max")
    text, again = says(capsys, "resume", f"--workdir={tmp_path / 's'}", code=1)
    assert again["trials"] == result["trials"] and sweep.read_definition(tmp_path / "s") == before
    assert run(["sweep", f"--workdir={tmp_path / 's'}"]) == 2
    assert "sweep resume" in capsys.readouterr().err
    assert run(["sweep", *argv, "--config.steps=30"]) == 2
    assert "config.steps: 20 -> 30" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    assert run(["sweep", "resume", f"--workdir={tmp_path / 's'}"]) == 2
    assert f"was started in {ROOT}" in capsys.readouterr().err


def test_runs_in_weights_and_biases_are_named_by_trial_and_sweep(tmp_path, monkeypatch):
    program = "import os; print(os.environ['WANDB_RUN_GROUP']); print('{\"ended\": \"done\"}')"
    launcher = local.Local(lambda made: [sys.executable, "-c", program], (), "mine", "f00")
    row = definition.Row("", {"seed": "3"})
    made = trial.make_trial(tmp_path, row, Config(steps=3, wandb_project="p"))
    assert launcher.start(made)
    while not (ended := launcher.ended(made)):
        pass
    assert ended == local.Ended(local.DONE)
    assert (made.folder / "wandb_id").read_text() == f"{made.id}-f00"
    assert "mine" in (made.folder / trial.LOG).read_text().splitlines()
