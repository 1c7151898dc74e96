"""The version that says how old tokens are is set in one place; keys of an image's pages."""

from __future__ import annotations

import ast
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxvlm
from jaxvlm.cache.state import advance, init, page_keys
from jaxvlm.types import PAGE

ROOT = pathlib.Path(jaxvlm.__file__).parent


def sets_version(tree):
    """Calls in a syntax tree that may set the version of a cache's state."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name == "CacheState" or (name == "_replace" and "version" in fields(node)):
                yield node


def fields(call):
    """Names of a call's keywords, those in ``**{...}`` too."""
    for keyword in call.keywords:
        if keyword.arg:
            yield keyword.arg
        elif isinstance(keyword.value, ast.Dict):
            yield from (key.value for key in keyword.value.keys if isinstance(key, ast.Constant))


def found_in(text):
    return len(list(sets_version(ast.parse(text))))


@pytest.mark.parametrize(
    "text, count",
    [
        ("cache = cache._replace(version=cache.version + 1)", 1),
        ("f(state.cache._replace(key=key, version=0))", 1),
        ("state._replace(**{'version': 0})", 1),
        ("state.CacheState(*leaves)", 1),
        ("state._replace(row_version=version)", 0),
        ("nbformat.read(path, version=4)", 0),
    ],
)
def test_it_is_found_where_it_is_set(text, count):
    assert found_in(text) == count


def test_nothing_outside_of_the_cache_sets_the_version():
    paths = sorted(ROOT.rglob("*.py"))
    outside = [p for p in paths if ROOT / "cache" not in p.parents]
    assert len(outside) > 100
    where = [str(p.relative_to(ROOT)) for p in outside if found_in(p.read_text())]
    assert not where, f"{where} set the cache's version; jaxvlm.cache.state.advance does it"


def test_inside_of_the_cache_one_function_raises_it():
    found = []
    for path in sorted((ROOT / "cache").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and list(sets_version(node)):
                found.append(f"{path.name}: {node.name}")
    assert found == ["state.py: init", "state.py: advance", "state.py: shardings"]


@pytest.mark.parametrize("updated", [True, False])
def test_an_update_raises_it_by_one(updated):
    state = init(4, 8, jnp.float32)._replace(version=jnp.int32(6))
    after = jax.jit(advance)(state, jnp.asarray(updated))
    assert after.version.dtype == jnp.int32 and int(after.version) == 6 + updated
    jax.tree.map(
        np.testing.assert_array_equal, after._replace(version=0), state._replace(version=0)
    )


def test_pages_of_an_image_have_keys_of_their_own():
    image = np.asarray([[1, 2, 3, 4], [1, 2, 3, 5]], np.uint32)
    keys = np.asarray(page_keys(jnp.asarray(image), 8)).reshape(-1, 4)
    assert len(np.unique(keys, axis=0)) == 16
    np.testing.assert_array_equal(keys[0], image[0])
    assert PAGE == 64
