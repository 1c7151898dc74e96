"""Trials are run once each, whatever is killed, fails, is lost or is stopped."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from jaxvlm.config import ConfigError
from jaxvlm.sweep import local, sweep, table
from tests.sweep import driver, stub

ROOT = pathlib.Path(__file__).resolve().parents[2]
RATES, SEEDS = (0.001, 0.01, 0.02, 0.03, 0.04, 0.05), (0, 1, 2, 3)
GRIDS = (f"optim.learning_rate={','.join(map(str, RATES))}", f"seed={','.join(map(str, SEEDS))}")


def start(workdir: pathlib.Path, *args: str, **how) -> subprocess.Popen:
    command = [sys.executable, "-m", "tests.sweep.driver", str(workdir), *args]
    out = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out, text=True, **how)


def finish(process: subprocess.Popen) -> str:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out


def states(workdir: pathlib.Path) -> dict[str, int]:
    return sweep.read_status(workdir)["counts"]


def folders(workdir: pathlib.Path) -> list[pathlib.Path]:
    return sorted(path.parent for path in workdir.glob("*/trial.json"))


def results(folder: pathlib.Path) -> list[str]:
    """Lines of a trial's log after its commands."""
    return [x for x in (folder / "log.txt").read_text().splitlines() if not x.startswith("$ ")]


def check_whole(workdir: pathlib.Path, trials: int) -> None:
    """Each trial ended well once, was never run after that, and never twice at once."""
    assert states(workdir) == {"done": trials}
    assert len(folders(workdir)) == trials
    for folder in folders(workdir):
        assert not (folder / "twice").exists()
        lines = (folder / "log.txt").read_text().splitlines()
        ends = [number for number, line in enumerate(lines) if '"done"' in line]
        assert ends == [len(lines) - 1], lines
        metrics = (folder / "metrics.jsonl").read_text().splitlines()
        steps = {json.loads(line)["step"] for line in metrics}
        assert sorted(steps) == list(range(1, stub.STEPS + 1))


def kill_trials(workdir: pathlib.Path) -> None:
    for folder in folders(workdir):
        if local.is_running(folder) and (pid := (folder / ".trial.lock").read_text()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def test_a_sweep_that_is_killed_at_any_moment_misses_nothing_and_repeats_nothing(tmp_path):
    """SIGKILL at ten drawn moments, of the sweep alone or of its trials too."""
    draw, kills, number = random.Random(0), 0, 0
    while kills < 10:
        workdir = tmp_path / str(number)
        process = start(workdir, *GRIDS, "parallel=4")
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(draw.uniform(0.1, 1.6))
        if process.poll() is None:
            process.kill()
            kills += 1
            if draw.random() < 0.5:
                kill_trials(workdir)
        else:
            number += 1
        process.communicate()
    workdir = tmp_path / str(number)
    finish(start(workdir, *GRIDS, "parallel=4"))
    for made in range(number + 1):
        check_whole(tmp_path / str(made), len(RATES) * len(SEEDS))
    groups = table.make_table(workdir).groups
    scores = np.array([[stub.score(rate, seed) for seed in SEEDS] for rate in RATES])
    order = np.argsort(-scores.mean(1))
    assert [group.settings for group in groups] == [
        {"optim.learning_rate": repr(RATES[i])} for i in order
    ]
    np.testing.assert_allclose([g.mean for g in groups], scores.mean(1)[order], rtol=1e-12)
    np.testing.assert_allclose([g.std for g in groups], scores.std(1, ddof=1)[order], rtol=1e-12)


def test_a_second_sweep_in_the_folder_is_refused(tmp_path):
    with start(tmp_path / "s", GRIDS[1], "optim.learning_rate=0.001") as process:
        process.stdout.readline()  # its first trial starts
        with pytest.raises(ConfigError, match="is writing to it"):
            driver.run(tmp_path / "s", GRIDS[1], "optim.learning_rate=0.001")
        finish(process)
    check_whole(tmp_path / "s", 4)


def test_what_fails_is_named_and_the_rest_go_on(tmp_path):
    said: list[str] = []
    rates = (stub.FAILS, 0.01, stub.ALWAYS_LOST, stub.LOST_ONCE_A_STEP, stub.CRASHES)
    grid = f"optim.learning_rate={','.join(map(str, rates))}"
    assert driver.run(tmp_path, grid, parallel=5, say=said.append)
    status = sweep.read_status(tmp_path)
    rows = {row["values"]["optim.learning_rate"]: row for row in status["trials"]}
    assert status["counts"] == {"done": 3, "failed": 2}
    assert rows[stub.FAILS]["line"] == "jaxvlm: config.data.train: no such file"
    assert rows[stub.ALWAYS_LOST]["line"] == (
        "lost 4 times without a new checkpoint: a peer is lost"
    )
    starts = {rate: len((tmp_path / row["id"] / "starts").read_text().split("\n")) - 1
              for rate, row in rows.items()}  # fmt: skip
    assert starts == {0.01: 1, stub.FAILS: 1, stub.ALWAYS_LOST: 4, stub.CRASHES: 2,
                      stub.LOST_ONCE_A_STEP: stub.STEPS}  # fmt: skip
    assert any("no such file" in line for line in said)
    text = table.as_text_lines(table.make_table(tmp_path))
    assert "no such file" in text and "a peer is lost" in text
    # The same command tries what failed again, and nothing else.
    assert driver.run(tmp_path, grid, parallel=5, say=said.append)
    assert len((tmp_path / rows[stub.FAILS]["id"] / "starts").read_text().split("\n")) - 1 == 2
    assert (tmp_path / rows[0.01]["id"] / "starts").read_text() == "\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_the_trials_save_and_the_sweep_goes_on(tmp_path, number):
    process = start(tmp_path / "s", GRIDS[1], "optim.learning_rate=0.001", "parallel=2")
    process.stdout.readline()
    while not list((tmp_path / "s").glob("*/metrics.jsonl")):
        time.sleep(0.01)
    process.send_signal(number)
    out = finish(process)
    assert out.endswith("stopped\n") and "was stopped" in out
    assert states(tmp_path / "s")["stopped"] >= 1
    assert not any(local.is_running(folder) for folder in folders(tmp_path / "s"))
    stopped = [f for f in folders(tmp_path / "s") if '{"ended": "preempted"}' in results(f)]
    assert stopped
    assert driver.run(tmp_path / "s", GRIDS[1], "optim.learning_rate=0.001", parallel=2)
    check_whole(tmp_path / "s", 4)


def test_trials_that_outlive_their_sweep_are_stopped_by_the_next(tmp_path):
    process = start(tmp_path / "s", GRIDS[1], "optim.learning_rate=0.001", "parallel=4")
    while len(list((tmp_path / "s").glob("*/metrics.jsonl"))) < 4:
        time.sleep(0.01)
    process.kill()
    process.communicate()
    process = start(tmp_path / "s", GRIDS[1], "optim.learning_rate=0.001", "parallel=4")
    line = process.stdout.readline()
    if "earlier sweep" in line:  # it is: a trial takes longer than a sweep's start
        process.send_signal(signal.SIGTERM)
    finish(process)
    assert not any(local.is_running(folder) for folder in folders(tmp_path / "s"))
    assert all(len((f / "starts").read_text()) == 1 for f in folders(tmp_path / "s"))


def test_a_changed_grid_keeps_old_trials_and_runs_new_ones(tmp_path):
    driver.run(tmp_path, "optim.learning_rate=0.01,0.02", "seed=0,1", parallel=4)
    before = {folder: (folder / "log.txt").read_bytes() for folder in folders(tmp_path)}
    driver.run(tmp_path, "optim.learning_rate=2e-2,3e-2", "seed=0,1", parallel=4)
    status = sweep.read_status(tmp_path)
    assert status["counts"] == {"done": 4}
    assert [row["values"]["optim.learning_rate"] for row in status["not_asked"]] == [0.01, 0.01]
    assert all(row["state"] == "done" for row in status["not_asked"])
    assert {folder: (folder / "log.txt").read_bytes() for folder in before} == before
    assert len(folders(tmp_path)) == 6
    made = table.make_table(tmp_path)
    assert [g.settings["optim.learning_rate"] for g in made.groups] == ["0.03", "0.02"]
    text = table.as_text_lines(made)
    assert sweep.NOT_ASKED in text and status["not_asked"][0]["id"] in text


def test_trials_of_two_machines_are_one_sweep_where_their_folders_are_moved_together(tmp_path):
    for seed in "01":
        driver.run(tmp_path / seed, "optim.learning_rate=0.01,0.02", f"seed={seed}", parallel=2)
    moved = [folder.rename(tmp_path / "0" / folder.name) for folder in folders(tmp_path / "1")]
    driver.run(tmp_path / "0", "seed=0,1", "optim.learning_rate=0.01,0.02", parallel=4)
    check_whole(tmp_path / "0", 4)
    assert all((folder / "starts").read_text() == "\n" for folder in moved)


def test_trials_of_another_recipe_are_refused_by_name(tmp_path):
    grid = f"optim.learning_rate=0.01,{stub.FAILS}"
    driver.run(tmp_path, grid)
    done, failed = (row["id"] for row in sweep.read_status(tmp_path)["trials"])
    before = (tmp_path / sweep.FILE).read_bytes()
    with pytest.raises(ConfigError, match=r"other settings: (\w+) \(config.steps: 10 -> 20") as e:
        driver.run(tmp_path, grid, recipe="20")
    assert done in str(e.value) and failed not in str(e.value)  # which was trained with nothing
    assert (tmp_path / sweep.FILE).read_bytes() == before
    (tmp_path / done).rename(tmp_path.with_name(f"{tmp_path.name}-old"))
    driver.run(tmp_path, grid, recipe="20")
    assert sweep.read_status(tmp_path)["counts"] == {"done": 1, "failed": 1}


def test_each_trial_has_devices_of_its_own(tmp_path):
    driver.run(tmp_path, GRIDS[1], "optim.learning_rate=0.01", parallel=2, devices=("0,1", "2,3"))
    used = [(folder / "starts").read_text().strip() for folder in folders(tmp_path)]
    assert sorted(used) == ["0,1", "0,1", "2,3", "2,3"]


def test_a_runs_folder_is_no_sweeps(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="is the folder of a run"):
        driver.run(tmp_path, GRIDS[0])
    with pytest.raises(ConfigError, match="holds no sweep"):
        sweep.read_status(tmp_path)
