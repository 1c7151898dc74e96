"""Compiler flags: all of them exist, a user's are stronger, and JAX gets them in time."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from jaxvlm.config import ConfigError
from jaxvlm.parallel import xla_flags


def test_a_users_flag_is_stronger():
    name = "--xla_gpu_enable_pipelined_all_gather"
    environ = {"JAX_PLATFORMS": "cuda", "XLA_FLAGS": f"{name}=false", "NCCL_PROTO": "LL"}
    changed = xla_flags.apply(["overlap", "nccl"], environ)
    assert f"{name}=false" in environ["XLA_FLAGS"] and f"{name}=true" not in environ["XLA_FLAGS"]
    assert "--xla_gpu_enable_latency_hiding_scheduler=true" in environ["XLA_FLAGS"]
    assert environ["NCCL_PROTO"] == "LL" and environ["NCCL_LL_BUFFSIZE"] == "-2"
    assert set(changed) == {"XLA_FLAGS", "NCCL_LL_BUFFSIZE", "NCCL_LL128_BUFFSIZE"}
    again = dict(environ)
    assert xla_flags.apply(["overlap", "nccl"], environ) == {} and environ == again


def test_platforms():
    assert xla_flags.platform({"JAX_PLATFORMS": "cuda,cpu"}) == "gpu"
    assert xla_flags.platform({"JAX_PLATFORMS": "gpu"}) == "gpu"
    assert xla_flags.platform({"JAX_PLATFORMS": "tpu"}) == "tpu"
    assert xla_flags.apply(["overlap", "nccl"], {"JAX_PLATFORMS": "cpu"}) == {}
    with pytest.raises(ConfigError, match=r"--xla_flags=fast; known: overlap, collective_matmul"):
        xla_flags.apply(["fast"], {"JAX_PLATFORMS": "cpu"})


def test_matmuls_are_split_or_whole():
    flag, environ = "--xla_jf_spmd_threshold_for_windowed_einsum_mib", {"JAX_PLATFORMS": "tpu"}
    assert xla_flags.apply(["whole_matmul"], environ) == {"LIBTPU_INIT_ARGS": f"{flag}=1000000"}
    with pytest.raises(ConfigError, match="splits matmuls and whole_matmul does not"):
        xla_flags.apply(["whole_matmul", "collective_matmul"], {"JAX_PLATFORMS": "tpu"})


def starts(program, **environ):
    return subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **environ}, capture_output=True
    )


def flags_of(platform):
    """Its groups' flags of the compiler, by the variable that holds them."""
    groups = xla_flags.GROUPS[platform].values()
    variable = next(variable for variable, _ in groups if variable)
    held = [flags.items() for name, flags in groups if name == variable]
    return variable, " ".join(f"{flag}={value}" for flags in held for flag, value in flags)


def test_the_compiler_knows_each_flag():
    """XLA reads the flags of all platforms whichever it is built for, and aborts on others."""
    program = "import jax; jax.devices()"
    for flags, known in ((flags_of("gpu")[1], True), ("--xla_gpu_no_such=1", False)):
        done = starts(program, JAX_PLATFORMS="cpu", XLA_FLAGS=flags)
        assert (done.returncode == 0) is known, done.stderr[-1000:]


COMPILE = """
import sys, jax
from jaxvlm.planner.compiled import topology
where = jax.sharding.SingleDeviceSharding(topology.devices(sys.argv[1])[0])
jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((8,), "float32", sharding=where)).compile()
"""


@pytest.mark.aot
@pytest.mark.parametrize(("platform", "target"), [("gpu", "h200:8"), ("tpu", "v6e:2x2")])
@pytest.mark.parametrize("known", [True, False])
def test_a_platforms_compiler_knows_each_flag(platform, target, known):
    """Its own, not the CPU's: libtpu and JAX's plugin for CUDA each parse the flags themselves."""
    variable, flags = flags_of(platform)
    flags = flags if known else f"--xla_{platform}_no_such=true"
    program = COMPILE.replace("sys.argv[1]", repr(target))
    skip = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    done = starts(program, JAX_PLATFORMS="cpu", **skip, **{variable: flags})
    assert (done.returncode == 0) is known, done.stderr[-1000:]


def test_the_command_prints_them(capsys, monkeypatch):
    from jaxvlm.cli.main import run

    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "")
    assert run(["train", "--xla_flags=overlap", "--print_xla_flags"]) == 0
    said = capsys.readouterr().out
    assert "gpu nccl: NCCL_PROTO=SIMPLE,LL,LL128" in said
    assert "here (tpu): LIBTPU_INIT_ARGS=--xla_tpu_enable_async_collective_fusion=true" in said
