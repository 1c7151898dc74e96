"""Rules of the house that no linter knows."""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "jaxvlm").rglob("*.py"))


def test_shard_map_lives_in_two_rooms():
    found = [p.relative_to(ROOT) for p in SOURCES if "shard_map" in p.read_text()]
    allowed = {"parallel", "cache", "plan"}  # plan/ names it, and calls nothing
    assert {p.parts[1] for p in found} <= allowed, found


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_are_small(path):
    text = path.read_text()
    assert text.count("\n") <= 500
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 80, f"{path}:{node.lineno} {node.name}"


def test_every_test_is_found(pytestconfig):
    """pytest goes into no folder that is named like one of these."""
    folders = [path for path in (ROOT / "tests").rglob("*") if path.is_dir()]
    left_out = pytestconfig.getini("norecursedirs")
    found = [p for p in folders if any(p.match(name) for name in left_out)]
    assert not [p for p in found if p.name != "__pycache__"]


def test_logging_is_set_up_by_the_command_line_alone():
    found = [p.relative_to(ROOT) for p in SOURCES if "basicConfig" in p.read_text()]
    assert [str(p) for p in found] == ["jaxvlm/cli/main.py"]


def test_no_pickle_is_read():
    for path in SOURCES:
        text = path.read_text()
        assert "import pickle" not in text and "allow_pickle=True" not in text, path


def test_help_needs_no_jax_and_nothing_needs_torch():
    code = """
import sys
sys.modules["torch"] = None
from jaxvlm.cli.main import run
assert run(["--help"]) == 0
assert "jax" not in sys.modules, "--help should not wait for JAX"
assert run(["train", "--help"]) == 0
assert "jax" not in sys.modules
import jaxvlm
jaxvlm.Run, jaxvlm.load
import jaxvlm.infer.generate, jaxvlm.models.families.llava, jaxvlm.models.families.dual
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_importing_sets_nothing_up():
    code = """
import os
import jax  # sets variables of its own
before = dict(os.environ)
import jaxvlm.build, jaxvlm.cli.main
assert dict(os.environ) == before
assert not jax._src.xla_bridge._backends, "an import started JAX's backends"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
