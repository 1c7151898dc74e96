"""Two processes write a checkpoint: one makes its folders late, or can't write any more."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loopback_store import on_s3
from runs import members

from jaxvlm.checkpoint.checkpointer import Checkpointer

PROGRAM = """
import os, resource, signal, sys, time
from jaxvlm.parallel.distributed import processes as distributed

assert distributed.initialize()
import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxvlm.checkpoint.checkpointer import Checkpointer

folder, wrong, which = sys.argv[1:]
mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
host = np.arange(32, dtype=np.float32).reshape(8, 4)
split = NamedSharding(mesh, PartitionSpec("data"))
state = {"deep": {"w": jax.make_array_from_callback((8, 4), split, lambda i: host[i])}}
checkpointer = Checkpointer(folder, 2, "", "max")
plain = os.mkdir

def late(path, *args, **kwargs):
    if "checkpoint-tmp" in str(path):
        time.sleep(1.0)
    return plain(path, *args, **kwargs)

with distributed.guard_peers():
    try:
        raise ValueError("of the loop")
    except ValueError:  # is handled by saving
        checkpointer.save(1, state, {})
        checkpointer.wait()
    if jax.process_index() == int(which):
        if wrong == "late":
            os.mkdir = late
        else:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    checkpointer.save(2, state, {})
    checkpointer.close()
"""


def run_pair(folder, wrong, which):
    """Exit codes of both, and what they said."""
    command = [sys.executable, "-c", PROGRAM, str(folder), wrong, str(which)]
    shared = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    pair = [
        subprocess.Popen(command, env=shared | own, text=True, stderr=subprocess.PIPE)
        for own in members(2)
    ]
    try:
        said = [process.communicate(timeout=120)[1] for process in pair]  # of one that hangs
        return [process.returncode for process in pair], said
    finally:
        for process in pair:
            process.kill()
            process.communicate()


@on_s3
@pytest.mark.parametrize("which", [0, 1])
def test_folders_that_one_process_makes_late_keep_none_waiting(store, url, which):
    codes, said = run_pair(url, "late", which)
    assert codes == [0, 0], said
    with Checkpointer(url, 2, "", "max") as checkpointer:
        leaf = jax.ShapeDtypeStruct((8, 4), jnp.float32)
        restored = checkpointer.restore({"deep": {"w": leaf}})
    assert restored.step == 2
    want = np.arange(32, dtype=np.float32).reshape(8, 4)
    np.testing.assert_array_equal(restored.state["deep"]["w"], want)


def fails(folder, which):
    codes, said = run_pair(folder, "full", which)
    assert 0 not in codes, said
    assert "File too large" in said[which] and f"process {which} of 2" in said[1 - which]
    with Checkpointer(folder, 2, "", "max") as checkpointer:
        assert checkpointer.all_steps() == [1]


@pytest.mark.parametrize("which", [0, 1])
def test_one_that_can_not_write_to_a_shared_disk_keeps_none_waiting(tmp_path, which):
    fails(tmp_path, which)


@on_s3
def test_one_that_can_not_write_what_it_sends_keeps_none_waiting(store, url):
    fails(url, 1)
