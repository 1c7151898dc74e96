"""Two processes write one checkpoint, agree on damage, and stop on SIGTERM with a complete one."""

import os
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from runs import members

from jaxvlm.checkpoint.checkpointer import Checkpointer

PROGRAM = """
import sys, time
from jaxvlm.parallel.distributed import processes as distributed

assert distributed.initialize()
import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxvlm.checkpoint.checkpointer import Checkpointer

mode, folder = sys.argv[1:]
mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
specs = {"split": PartitionSpec("data"), "whole": PartitionSpec()}
host = {name: np.arange(64, dtype=np.float32).reshape(16, 4) for name in specs}
state = {
    name: jax.make_array_from_callback((16, 4), NamedSharding(mesh, spec), lambda i: host[name][i])
    for name, spec in specs.items()
}
bump = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
abstract = {
    name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for name, x in state.items()
}
warnings = []
checkpointer = Checkpointer(folder, 2, "score", "max", on_warning=warnings.append)
start = 0
with distributed.guard_peers():
    if mode == "resume":
        start, state, extra = checkpointer.restore(abstract)
        print("restored", start, extra, len(warnings), flush=True)
    for step in range(start + 1, 10_000):
        state = bump(state)
        if distributed.should_stop(step):
            checkpointer.save(step, state, {"step": step})
            checkpointer.wait()
            print("stopped", step, flush=True)
            break
        if step % 20 == 0:
            checkpointer.save(step, state, {"step": step})
        if step == 60:
            checkpointer.wait()
            print("running", flush=True)
        time.sleep(0.005)
    checkpointer.close()
"""


def run_pair(mode: str, folder) -> list[str]:
    command = [sys.executable, "-c", PROGRAM, mode, str(folder)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    shared = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    pair = [subprocess.Popen(command, env=shared | own, text=True, **pipes) for own in members(2)]
    try:
        heads = []
        for process in pair:
            heads.append("")
            for line in iter(process.stdout.readline, ""):
                heads[-1] += line
                if line == "running\n" or line.startswith("restored"):
                    break
        time.sleep(0.2)
        pair[1].send_signal(signal.SIGTERM)
        outputs = [process.communicate(timeout=60) for process in pair]
        assert [process.returncode for process in pair] == [0, 0], outputs
        return [head + output for head, (output, _) in zip(heads, outputs)]
    finally:
        for process in pair:
            process.kill()


def test_write_stop_damage_and_resume(tmp_path):
    first, second = (output.split() for output in run_pair("start", tmp_path))
    stopped = int(first[first.index("stopped") + 1])
    assert stopped == int(second[second.index("stopped") + 1])

    checkpointer = Checkpointer(tmp_path, 2, "score", "max")
    leaf = jax.ShapeDtypeStruct((16, 4), jnp.float32)
    restored = checkpointer.restore({"split": leaf, "whole": leaf})
    assert (restored.step, restored.extra) == (stopped, {"step": stopped})
    want = np.arange(64, dtype=np.float32).reshape(16, 4) + stopped
    for name in ("split", "whole"):
        np.testing.assert_array_equal(restored.state[name], want)
    before = checkpointer.all_steps()[-2]
    checkpointer.close()

    shutil.rmtree(tmp_path / str(stopped) / "state")
    shutil.copytree(tmp_path / str(before) / "state", tmp_path / str(stopped) / "state")
    for output in run_pair("resume", tmp_path):
        assert f"restored {before} {{'step': {before}}} 1\n" in output
