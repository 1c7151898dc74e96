"""Two processes with four devices each are one run; neither outlives the other in silence."""

from __future__ import annotations

import socket
import time

import pytest
from runs import finish, losses, start


def together(workdir, data, *args):
    """Both processes of one run."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return [
        start(
            workdir,
            data,
            *args,
            devices=4,
            JAXVLM_COORDINATOR=f"127.0.0.1:{port}",
            JAXVLM_NUM_PROCESSES="2",
            JAXVLM_PROCESS_ID=str(number),
        )
        for number in range(2)
    ]


@pytest.mark.long
def test_two_processes_give_one_processs_losses(data, tmp_path):
    args = ("--config.mesh.data=4", "--config.mesh.fsdp=2", f"--config.data.eval={data}")
    args += ("--config.model.decoder.dropout=0.1",)
    alone, both = tmp_path / "alone", tmp_path / "both"
    finish(start(alone, data, *args))
    processes = together(both, data, *args)
    try:
        outputs = [finish(process) for process in processes]
    finally:
        for process in processes:
            process.kill()
    expected, got = losses(alone), losses(both)
    assert got.keys() == expected.keys() == set(range(1, 13))
    for step, loss in expected.items():
        assert abs(got[step] - loss) <= 1e-6 * abs(loss), step
    assert "80 answers" in outputs[0], "each record is scored once, not once a process"
    assert "train 12/12" in outputs[0] and "train" not in outputs[1], "process 0 alone speaks"
    assert (both / "predictions.png").is_file()


@pytest.mark.parametrize(
    "victim",
    [pytest.param(0, marks=pytest.mark.long), 1],
    ids=["coordinator", "other"],
)
def test_a_killed_process_ends_the_other_with_a_message(data, tmp_path, victim):
    processes = together(tmp_path, data, "--config.steps=100000", "--config.checkpoint.every=50")
    deadline = time.monotonic() + 120
    while not (tmp_path / "metrics.jsonl").exists():
        assert all(p.poll() is None for p in processes), [p.communicate() for p in processes]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(1.0)
    processes[victim].kill()
    processes[victim].communicate()
    survivor = processes[1 - victim]
    begin = time.monotonic()
    _, err = survivor.communicate(timeout=60)
    assert time.monotonic() - begin < 60
    assert survivor.returncode not in (0, None)
    lines = [line for line in err.splitlines() if line.startswith("jaxvlm")]
    assert any(f"process {victim}" in line for line in lines), err[-2000:]
