"""Two processes under each launcher's variables train to one process's losses."""

from __future__ import annotations

import pytest
from launcher_variables import LOOPBACK, on_loopback
from numerics import close
from runs import finish, losses, start

MESH = ("--config.mesh.data=4", "--config.mesh.fsdp=2")


@pytest.fixture(scope="module")
def alone(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    finish(start(folder, data, devices=1))
    return losses(folder)


@pytest.mark.long
@pytest.mark.parametrize("launcher", LOOPBACK)
def test_each_launchers_processes_train_to_one_processs_losses(data, tmp_path, alone, launcher):
    of = on_loopback(launcher)
    running = [start(tmp_path, data, *MESH, devices=4, **of(str(i))) for i in range(2)]
    try:
        for process in running:
            finish(process)
    finally:
        for process in running:
            process.kill()
    found = losses(tmp_path)
    assert found.keys() == alone.keys()
    for step, loss in alone.items():
        close(found[step], loss, 1e-5, step)
