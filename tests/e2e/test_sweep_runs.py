"""``jaxvlm sweep`` with real trials, which are the runs that ``jaxvlm train`` makes."""

from __future__ import annotations

import json
import signal
import subprocess
import time

import pytest
from runs import HERE, command, environment, finish, losses, start


@pytest.mark.long
def test_a_sweep_of_real_runs_is_stopped_and_resumed(tmp_path, data):
    """Trials save on SIGTERM, go on, and have the losses of the same run by itself."""
    trials = tmp_path / "trials.jsonl"
    rows = [{"seed": 0}, {"data.batch_size": 7}, {"seed": 1, "optim.learning_rate": 1e-3}]
    trials.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = f"--workdir={tmp_path / 's'}"
    evaluated = [f"--config.data.eval={data}", "--config.eval_records=8"]
    evaluated += ["--config.steps=100", "--config.checkpoint.every=10"]
    asked = [f"--config={HERE / 'recipe.py'}:{data}", f"--trials={trials}", *evaluated]

    def sweep(*args: str) -> subprocess.Popen:
        out = subprocess.PIPE
        env = environment(devices=2)
        return subprocess.Popen(command("sweep", *args), env=env, stdout=out, stderr=out, text=True)

    process = sweep(folder, *asked)
    while process.poll() is None and not list((tmp_path / "s").glob("*/checkpoints/10")):
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    said = finish(process)
    assert "`jaxvlm sweep resume" in said
    status = json.loads(finish(sweep("status", folder, "--json")).splitlines()[-1])
    assert status["trials"][0]["state"] in ("stopped", "done")  # if it was faster than the signal
    assert status["trials"][0]["step"] >= 10 and status["counts"]["waiting"]

    process = sweep("resume", folder, "--json")
    out, err = process.communicate(timeout=600)
    assert process.returncode == 1, err  # one failed
    result = json.loads(out.splitlines()[-1])
    first, failed, last = result["trials"]
    assert [row["state"] for row in result["trials"]] == ["done", "failed", "done"]
    assert "data.batch_size=7" in failed["line"] and failed["line"] in out
    groups = result["table"]["groups"]
    assert sorted(n for group in groups for n in group["scores"]) == sorted(
        [first["id"], last["id"]]
    )
    assert all(0 <= group["mean"] <= 1 for group in groups if group["n"])
    one = [*evaluated, "--config.seed=1", "--config.optim.learning_rate=0.001"]
    for row, args in ((first, evaluated), (last, one)):
        alone = tmp_path / f"alone-{row['id']}"
        finish(start(alone, data, *args, devices=2))
        assert losses(tmp_path / "s" / row["id"]) == losses(alone)
