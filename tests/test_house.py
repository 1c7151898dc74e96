"""Rules of the house that no linter knows."""

from __future__ import annotations

import ast
import configparser
import pathlib
import re
import subprocess
import sys

import on_demand
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "jaxvlm").rglob("*.py"))


def test_shard_map_lives_in_two_rooms():
    found = [p.relative_to(ROOT) for p in SOURCES if "shard_map" in p.read_text()]
    allowed = {"parallel", "cache", "planner"}  # planner/ names it, and calls nothing
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


@pytest.mark.parametrize("table", ["TESTS", "LONG"])
def test_what_runs_on_demand_is_there(table):
    for file, name in [(x, y) for x, names in getattr(on_demand, table).items() for y in names]:
        text = (pathlib.Path(__file__).parent / file).read_text()
        assert re.search(rf"def {name.partition('[')[0]}\(", text), name


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
jaxvlm.Trainer, jaxvlm.load
import jaxvlm.inference.generate, jaxvlm.hf.families.llava, jaxvlm.hf.families.dual_encoders
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_importing_sets_nothing_up():
    code = """
import os
import jax  # sets variables of its own
before = dict(os.environ)
import jaxvlm.trainer.trainer, jaxvlm.cli.main
assert dict(os.environ) == before
assert not jax._src.xla_bridge._backends, "an import started JAX's backends"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def imports_of(path):
    """Modules of jaxvlm that a file imports anywhere, those for type checkers alone included."""
    modules = {".".join(p.relative_to(ROOT).with_suffix("").parts) for p in SOURCES}
    modules |= {name.removesuffix(".__init__") for name in modules}
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "jaxvlm":
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in modules else node.module)
    return found


def test_no_module_imports_in_a_circle():
    graph = {
        ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): imports_of(p)
        for p in SOURCES
    }
    done, circles = set(), []

    def visit(name, trail):
        if name in trail:
            circles.append(" -> ".join((*trail[trail.index(name) :], name)))
        elif name not in done:
            for other in sorted(graph.get(name, ())):
                visit(other, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())
    assert not circles, circles


def layers():
    """Rooms by layer, top first, from the contract in setup.cfg."""
    cfg = configparser.ConfigParser()
    cfg.read(ROOT / "setup.cfg")
    lines = cfg["importlinter:contract:layers"]["layers"].split("\n")
    return [[room.strip() for room in line.split("|")] for line in lines if line.strip()]


def test_no_room_imports_upward_even_for_types():
    level = {room: i for i, line in enumerate(layers()) for room in line}
    for path in SOURCES:
        room = path.relative_to(ROOT / "jaxvlm").with_suffix("").parts[0]
        for name in imports_of(path):
            other = (name.split(".") + ["__init__"])[1]
            if "__init__" in (room, other) or room == other:
                continue
            assert level[room] < level[other], f"{path.relative_to(ROOT)} imports {name}"


def test_every_room_is_in_the_contract_and_in_the_design():
    rooms = {p.relative_to(ROOT / "jaxvlm").with_suffix("").parts[0] for p in SOURCES}
    known = {room for line in layers() for room in line}
    assert rooms - {"__init__"} == known
    page = (ROOT / "docs" / "design.md").read_text()
    diagram = page.split("```mermaid")[1].split("```")[0]
    assert known - {"__main__"} == set(re.findall(r"[a-z]\w+", diagram)) - {
        "flowchart",
        "subgraph",
        "end",
    }
    for room in known - {"__main__"}:
        assert re.search(rf"^  {room}(/|\.py) ", page, re.M), f"docs/design.md lists no {room}"


def test_no_folder_has_a_name_of_generated_files():
    folders = {p.name for p in (ROOT / "jaxvlm").rglob("*") if p.is_dir()}
    assert not folders & {"build", "dist", "out", "target"}


PLAIN_RUN = """
import inspect, sys
files = set()

def seen(frame, event, arg):
    name = frame.f_code.co_filename
    function = frame.f_code.co_flags & inspect.CO_OPTIMIZED  # no module's, no class's body
    if event == "call" and "/jaxvlm/" in name and function:
        files.add(name.split("/jaxvlm/")[-1])

import threading
sys.setprofile(seen)
threading.setprofile(seen)
from jaxvlm.cli.main import run
assert run([
    "train", "--config=configs/quickstart.py:smoke", "--config.epochs=0", "--config.steps=2",
    "--config.optim.warmup_steps=1", "--config.eval_every=0", "--config.eval_records=8",
    "--config.tensorboard=False", "--workdir=" + sys.argv[1],
]) == 0
sys.setprofile(None)
print(len(files), *sorted(files), sep="\\n", file=sys.stderr)
assert not any(name.startswith("planner/") for name in files)
assert not any(name.startswith("jaxvlm.planner") for name in sys.modules)
assert len(files) <= 80, len(files)  # never raise this
"""


@pytest.mark.long
def test_a_plain_run_stays_small(tmp_path):
    """A reader of the quickstart's first steps opens few files, and none of the planner's."""
    command = [sys.executable, "-c", PLAIN_RUN, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stderr


def test_the_trainer_is_one_page():
    assert (ROOT / "jaxvlm/trainer/trainer.py").read_text().count("\n") <= 150
