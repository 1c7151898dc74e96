"""The script for an accelerator's machine, run whole on a CPU with only what such a machine has."""

import json
import math
import os
import pathlib
import re
import subprocess
import sys
import time

import pytest

from benchmarks import accelerator

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODULES = {
    "absl-py": "absl", "PyYAML": "yaml", "pillow": "PIL", "MarkupSafe": "markupsafe",
    "markdown-it-py": "markdown_it",
}  # fmt: skip
"""Packages whose modules have other names."""
LENT = {"jax", "jaxlib", "numpy", "scipy", "ml_dtypes", "opt_einsum", "benchmarks", "jaxvlm"}
"""What a machine with JAX has; and the repository."""
HOOK = """
import os, sys

ALLOWED = set(os.environ["ONLY_MODULES"].split(",")) | sys.stdlib_module_names

class Only:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        if path is None and name not in ALLOWED and not name.startswith("_"):
            return None
        return self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Only, sys.meta_path)
"""


def carried():
    """Modules of the packages of accelerator_wheels.txt."""
    lines = (ROOT / "benchmarks" / "accelerator_wheels.txt").read_text().splitlines()
    names = [re.split("[><=]", line)[0] for line in lines if not line.startswith("#")]
    return {MODULES.get(name, name) for name in names}


def run(folder, modules, *flags, devices=1):
    """Lines of the script by part, where only ``modules`` can be imported."""
    (folder / "sitecustomize.py").write_text(HOOK)
    env = dict(os.environ, PYTHONPATH=str(folder), ONLY_MODULES=",".join(modules | LENT))
    env |= {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    command = [sys.executable, "benchmarks/accelerator.py", f"--output={folder}", *flags]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = (folder / "accelerator.jsonl").read_text()
    assert lines == done.stdout
    return {line["part"]: line for line in map(json.loads, lines.splitlines())}


def listed():
    """Names of all parts, from a Python that has the standard library alone."""
    command = [sys.executable, "-S", "-I", "benchmarks/accelerator.py", "--list"]
    return subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()


def expected_reason(part):
    """Why a part has no figures on one CPU device without torch; "" if it must have them."""
    if part.startswith("parity/cudnn/"):
        return "cuDNN runs on NVIDIA's GPUs"
    if part.startswith("torch/"):
        return "needs torch"
    return "needs at least 4 devices" if part.startswith("strategies/") else ""


def check_step(line):
    """Figures of a train step."""
    assert "why" not in line and line["last_loss"] < line["first_loss"], line
    assert line["median_ms"] > 0 and line["model_tflop_per_device"] > 0
    if "pipeline" in line["mesh"]:
        assert "can't be planned" in line["planned_why"]
        return
    peak, planned = line["compiler_gib"]["peak"], line["planned_gib"]["peak"]
    assert abs(math.log(planned / peak)) < math.log(2), line


@pytest.mark.long
def test_each_part_has_figures_or_a_reason(tmp_path):
    found = run(tmp_path, carried(), "--tiny", "--deadline=1500")
    assert list(found) == listed()
    for part, line in found.items():
        why = expected_reason(part)
        assert line.get("why", "").startswith(why) and bool(why) == ("why" in line), line
        if why:
            continue
        if part.startswith(("parity/", "experts/")):
            assert line["within_bound"], line
            assert max(line["errors"].values()) > 0 or "float32" in part
        elif part.startswith("decode/"):
            whole, *fewer = line["ways"]
            assert whole["way"] == "none" and whole["tokens_per_s"] > 0
            assert all(way["kv_bytes"] < whole["kv_bytes"] for way in fewer)
        elif part != "environment":
            check_step(line)
    assert found["environment"]["missing"] == []
    assert found["smolvlm-256m/frozen encoder/cache warm"]["cache_hit_rate"] == 1.0
    off, warm = (found[f"smolvlm-256m/frozen encoder/cache {x}"] for x in ("off", "warm"))
    assert warm["last_loss"] == pytest.approx(off["last_loss"], rel=1e-5)
    plain, cached = found["clip-vit-b-32"], found["clip-vit-b-32/gradcache"]
    assert plain["last_loss"] == pytest.approx(cached["last_loss"], rel=1e-4)


@pytest.mark.long
def test_each_strategy_has_figures(tmp_path):
    found = run(tmp_path, carried(), "--tiny", "--deadline=1500", "--parts=strategies", devices=4)
    assert list(found) == [part for part in listed() if part.startswith("strategies/")]
    for line in found.values():
        check_step(line)
        assert math.prod(line["mesh"].values()) == 4
        # The same model and batch everywhere.
        assert line["first_loss"] == pytest.approx(found["strategies/ddp"]["first_loss"], rel=1e-5)


def test_without_wheels_each_part_names_what_it_needs(tmp_path):
    found = run(tmp_path, set(), "--tiny", "--parts=environment,parity/flash/packed,qwen,torch")
    assert "flax" in found["environment"]["missing"]
    for part, line in found.items():
        if part != "environment":
            assert re.match(r"needs \w+: bring its wheel", line["why"]), line


def test_real_sizes_are_not_begun_on_a_cpu(tmp_path):
    found = run(tmp_path, carried(), "--parts=parity/flash/packed,experts/xla")
    assert found and all("use --tiny" in line["why"] for line in found.values())


def test_a_part_that_dies_or_is_late_ends_nothing_else(monkeypatch):
    def part(name, seconds=60.0):
        return accelerator.Part(name, "", {}, seconds, "one")

    # A name that its process does not know ends it.
    parts = [part("experts/xla/float64"), part("experts/xla/bfloat16")]
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    now = time.monotonic()
    died, other = accelerator.results(parts, False, now + 120)
    assert "its process ended with 1: KeyError: 'experts/xla/float64'" in died["why"]
    assert "use --tiny" in other["why"]
    (late,) = accelerator.results([part("environment", 0.01)], False, now + 120)
    assert late == {"part": "environment", "seconds": late["seconds"], "why": late["why"]}
    assert late["why"] == "it took more than 0 s"
    none = accelerator.results(parts, False, now)
    assert [line["why"] for line in none] == 2 * ["the deadline came before it"]
