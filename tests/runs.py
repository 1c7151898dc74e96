"""Data and processes for whole runs."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import signal
import socket
import subprocess
import sys

import numpy as np
from PIL import Image

FLAGS = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    " --xla_cpu_parallel_codegen_split_count=1"
)
"""Compiling is the cost of tests: programs that are worse and made in a quarter of the time."""
if importlib.metadata.version("jaxlib").startswith("0.10."):  # later ones do not know it
    FLAGS += " --xla_cpu_use_fusion_emitters=false"
    # Eight devices on two busy cores may take longer than its 40 s to meet.
    FLAGS += " --xla_cpu_collective_call_terminate_timeout_seconds=300"

# The one flag that a user may give: an instruction set for the compiler to stay within.
for _flag in os.environ.get("XLA_FLAGS", "").split():
    if _flag.startswith("--xla_cpu_max_isa=") and _flag not in FLAGS:
        FLAGS += f" {_flag}"

HERE = pathlib.Path(__file__).parent / "e2e"


def compile_cache() -> pathlib.Path:
    """The folder of compiled programs that test runs of all clones share.

    It lies outside of the clone, so that the next clone's run compiles little, and is of one kind
    of processor, whose instructions the programs use. In the clone where the home is read-only.
    """
    cpu = pathlib.Path("/proc/cpuinfo")
    kinds = ("flags", "model name", "Features")
    said = cpu.read_text() if cpu.is_file() else platform.processor()
    lines = sorted({line for line in said.splitlines() if line.startswith(kinds)})
    name = hashlib.blake2b("\n".join(lines).encode(), digest_size=6).hexdigest()
    folder = pathlib.Path.home() / ".cache" / "jaxvlm" / f"xla-tests-{name}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        usable = os.access(folder, os.W_OK)
    except OSError:
        usable = False
    return folder if usable else pathlib.Path(__file__).parent.parent / ".cache" / "xla-tests"


COLORS = {"red": (220, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 220)}


def write_data(folder: pathlib.Path, images: int = 40, name: str = "data.jsonl") -> pathlib.Path:
    """Images of one colour with two questions each, as messages."""
    rng = np.random.default_rng(0)
    lines = []
    for i in range(images):
        color = list(COLORS)[i % len(COLORS)]
        noise = rng.integers(-20, 20, (16, 16, 3))
        pixels = np.clip(np.asarray(COLORS[color]) + noise, 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
        for question, answer in (
            ("which color is it?", color),
            ("is it red?", "yes" if color == "red" else "no"),
        ):
            content = [{"type": "image", "image": f"{i}.png"}, {"type": "text", "text": question}]
            messages = [
                {"role": "user", "content": content},
                {"role": "assistant", "content": answer},
            ]
            lines.append(json.dumps({"id": f"{i}-{answer}", "messages": messages}))
    path = folder / name
    path.write_text("\n".join(lines) + "\n")
    return path


def write_captions(folder: pathlib.Path) -> pathlib.Path:
    """Pairs of the images of :func:`write_data` and what to call them; three are no batch."""
    lines = [
        {
            "id": str(i),
            "query_image": f"{i}.png",
            "positive": f"a {list(COLORS)[i % 3]} image number {i}",
            "negatives": [f"a {list(COLORS)[(i + 1) % 3]} one"],
            "label": list(COLORS)[i % 3],
        }
        for i in range(40)
    ]
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def recipe(data: pathlib.Path):
    """The recipe's ConfigDict for ``data``."""
    spec = importlib.util.spec_from_file_location("recipe", HERE / "recipe.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config(str(data))


def refused(run, *args: str) -> str:
    """The one line with which ``run`` -> (exit code, what it said) refuses ``args``."""
    code, line = run(*args)
    assert code == 2 and line.count("\n") == 1, line
    return line


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "jaxvlm", *args]


def environment(devices: int = 8, **extra: str) -> dict[str, str]:
    flags = f"--xla_force_host_platform_device_count={devices} {FLAGS}"
    own = {"XLA_FLAGS": flags, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    return os.environ | own | extra


def members(count: int) -> list[dict[str, str]]:
    """Variables of each process of one run on this machine."""
    here = f"127.0.0.1:{free_port()}"
    return [
        {
            "JAXVLM_COORDINATOR": here,
            "JAXVLM_NUM_PROCESSES": str(count),
            "JAXVLM_PROCESS_ID": str(number),
        }
        for number in range(count)
    ]


def start(
    workdir: pathlib.Path, data: pathlib.Path, *args: str, devices: int = 8, cwd=None, **env: str
):
    """``jaxvlm train`` as a process of its own."""
    return subprocess.Popen(
        command("train", f"--config={HERE / 'recipe.py'}:{data}", f"--workdir={workdir}", *args),
        env=environment(devices, **env),
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process, timeout: float = 600) -> str:
    """What it said. ``timeout`` is for one that hangs: it says where each of its threads is."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)
        raise AssertionError(
            f"not done in {timeout} s: {process.communicate()[1][-9000:]}"
        ) from None
    assert process.returncode == 0, err[-3000:]
    return out + err


def losses(workdir: pathlib.Path) -> dict[int, float]:
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}


def without_torch(program: str, *args: object, devices: int = 8) -> str:
    """What ``program`` says in a process that has no torch; it must end well."""
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, args)],
        env=environment(devices),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "weights from" in done.stderr
    return done.stderr


def finished_pair(program: str, *args: str, of) -> list[str]:
    """What two processes of a program print, which both end with 0.

    ``of``: a process's number -> its variables.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    pair = [
        subprocess.Popen(
            [sys.executable, "-c", program, *args],
            env=os.environ | {"JAX_PLATFORMS": "cpu"} | of(i),
            text=True,
            **pipes,
        )
        for i in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=300) for process in pair]
    finally:
        for process in pair:
            process.kill()
    assert [process.returncode for process in pair] == [0, 0], outputs
    return [output for output, _ in outputs]


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
