"""The notebooks run from top to bottom, and define nothing."""

from __future__ import annotations

import ast
import pathlib
import warnings

import pytest

NOTEBOOKS = sorted((pathlib.Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
SAID = {
    "kv_cache.ipynb": ("vl_cache at 25%", "KV cache of the prompts"),
    "federated.ipynb": ("version 6 of 6", "allowed: 60"),
    "pods.ipynb": ("mesh: data=2 x fsdp=2 x tensor=2", "fsdp: 13% of the parameters", "MFU"),
    "quickstart.ipynb": ("exact_match", "->"),
    "cache.ipynb": (
        "hit rate of the last step: 1.0",
        "the run that writes: from the store 0% in its first step",
        "the run that reads: from the store 100% in its first step, 100% in its last",
        "96 images, exact",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_notebook_runs(path, tmp_path, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the notebook machinery, on its way to new versions
        import nbclient
        import nbformat

        monkeypatch.setenv("SMOKE", "1")
        monkeypatch.setenv("WORKDIR", str(tmp_path))
        monkeypatch.setenv("XLA_FLAGS", "")
        notebook = nbformat.read(path, as_version=4)
        nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    outputs = [o for cell in notebook.cells if cell.cell_type == "code" for o in cell.outputs]
    text = "".join(o.get("text", "") for o in outputs)
    assert all(said in text for said in SAID[path.name]), text
    assert any("image/png" in o.get("data", {}) for o in outputs), "the curves"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_notebook_defines_nothing(path):
    import nbformat

    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            nodes = ast.walk(ast.parse(cell.source))
            assert not [n for n in nodes if isinstance(n, (ast.FunctionDef, ast.ClassDef))]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_notebook_imports_what_there_is(path):
    import nbformat

    cells = [c.source for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]
    nodes = [node for source in cells for node in ast.walk(ast.parse(source))]
    imports = [n for n in nodes if isinstance(n, ast.ImportFrom) and n.module]
    found = [n for n in imports if n.module.split(".")[0] in ("jaxvlm", "configs")]
    assert found
    for node in found:
        exec(ast.unparse(node), {})
