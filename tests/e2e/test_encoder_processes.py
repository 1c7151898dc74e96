"""A disaggregated vision encoder with devices of several processes: one process's losses."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest
from runs import finish, free_port, losses, start

ENCODER = (
    *("--config.encoder.strategy.name=zero2", "--config.strategy.name=fsdp"),
    *("--config.microbatches=2", "--config.model.decoder.dropout=0.1", "--config.log_every=1"),
)


def together(workdir, data, processes, *args):
    port = free_port()
    return [
        start(
            workdir, data, *args, devices=8 // processes,
            JAXVLM_COORDINATOR=f"127.0.0.1:{port}", JAXVLM_NUM_PROCESSES=str(processes),
            JAXVLM_PROCESS_ID=str(i),
        )
        for i in range(processes)
    ]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("processes, frozen", [(2, False), (4, False), (2, True)])
def test_several_processes_give_ones_losses(data, tmp_path, processes, frozen):
    args = (*ENCODER, "--config.encoder.devices=4", "--config.data.batch_size=16")
    args += (f"--config.data.eval={data}",)
    args += ("--config.optim.frozen=('vision/*',)",) if frozen else ()
    alone, several = tmp_path / "alone", tmp_path / "several"
    finish(start(alone, data, *args))
    running = together(several, data, processes, *args)
    while not (several / "checkpoints" / "3").is_dir():  # then all of it goes on from there
        assert all(process.poll() is None for process in running)
        time.sleep(0.05)
    os.kill(running[-1].pid, signal.SIGKILL)
    for process in running:
        process.communicate(timeout=300)
    assert [process.returncode for process in running[:-1]] == [75] * (processes - 1)
    for process in together(several, data, processes, *args):
        finish(process)
    one, both = losses(alone), losses(several)
    assert one.keys() == both.keys() == set(range(1, 13))
    assert max(abs(one[i] - both[i]) for i in one) < 1e-5
    answers = [json.loads((x / "metrics.jsonl").read_text().splitlines()[-1]) for x in
               (alone, several)]  # fmt: skip
    assert answers[0]["eval/exact_match"] == answers[1]["eval/exact_match"]


@pytest.mark.long
def test_a_mesh_that_would_move_features_between_processes_is_refused(data, tmp_path):
    args = (*ENCODER, "--config.encoder.devices=4", "--config.data.batch_size=16")
    args += ("--config.mesh.context=4", "--config.mesh.fsdp=1", "--config.strategy.name=ddp")
    said = [process.communicate(timeout=300)[1] for process in together(tmp_path, data, 2, *args)]
    assert all("features do not move between processes" in text for text in said), said
