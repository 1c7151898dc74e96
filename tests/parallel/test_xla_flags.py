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


def starts(program, **environ):
    return subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **environ}, capture_output=True
    )


def test_the_compiler_knows_each_flag():
    """XLA reads the flags of all platforms whichever it is built for, and aborts on others."""
    environ = {"JAX_PLATFORMS": "cuda"}
    xla_flags.apply(["overlap", "collective_matmul"], environ)
    program = "import jax; jax.devices()"
    assert starts(program, JAX_PLATFORMS="cpu", XLA_FLAGS=environ["XLA_FLAGS"]).returncode == 0
    assert starts(program, JAX_PLATFORMS="cpu", XLA_FLAGS="--xla_gpu_no_such=1").returncode != 0


@pytest.mark.long
def test_libtpu_knows_each_flag():
    pytest.importorskip("libtpu", reason="the compiler; pip install 'jaxvlm[aot]'")
    environ = {"JAX_PLATFORMS": "tpu"}
    xla_flags.apply(["overlap", "collective_matmul"], environ)
    program = "from jaxvlm.planner import topology; topology.devices('v5e:2x2')"
    known = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    done = starts(program, **known, LIBTPU_INIT_ARGS=environ["LIBTPU_INIT_ARGS"])
    assert done.returncode == 0, done.stderr[-1000:]


def test_the_command_prints_them(capsys, monkeypatch):
    from jaxvlm.cli.main import run

    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "")
    assert run(["train", "--xla_flags=overlap", "--print_xla_flags"]) == 0
    said = capsys.readouterr().out
    assert "gpu nccl: NCCL_PROTO=SIMPLE,LL,LL128" in said
    assert "here (tpu): LIBTPU_INIT_ARGS=--xla_tpu_enable_async_collective_fusion=true" in said
