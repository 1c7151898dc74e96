"""What a process does before JAX starts."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
from jaxvlm.parallel.distributed.processes import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
import jax, jax.numpy as jnp
f = jax.jit(lambda x: jax.lax.optimization_barrier(jnp.outer(x, x)).sum(0))  # 256 MB, temporary
x = jnp.arange(8192.0)
for _ in range(3):
    f(x).block_until_ready()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
f(x).block_until_ready()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how):
    env = dict(os.environ, JAX_PLATFORMS="cpu", XLA_FLAGS="")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, how], env=env, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's mallopt")
def test_freed_memory_is_not_faulted_in_again():
    assert faults("keep") < 1000 < faults("hand back")
