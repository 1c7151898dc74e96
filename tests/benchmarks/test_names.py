"""Scripts that run for hours name what the package has."""

import ast
import importlib
import pathlib
import types

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def modules_of(tree):
    """Name in a script -> the module of jaxvlm that it stands for."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jaxvlm"):
            module = importlib.import_module(node.module)
            for name in node.names:
                inside = getattr(module, name.name, None)
                if inside is None:
                    inside = importlib.import_module(f"{node.module}.{name.name}")
                if isinstance(inside, types.ModuleType):
                    found[name.asname or name.name] = inside
    return found


@pytest.mark.parametrize("folder", ["benchmarks", "benchmarks/accelerator_parts", "launch"])
def test_every_name_is_there(folder):
    missing = []
    for path in sorted((ROOT / folder).glob("*.py")):
        tree = ast.parse(path.read_text())
        known = modules_of(tree)
        missing += [
            f"{path.name}:{node.lineno}: {node.value.id}.{node.attr}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in known
            and not hasattr(known[node.value.id], node.attr)
        ]
    assert not missing
