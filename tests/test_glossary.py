"""One word for one thing: private words that the glossary replaced do not come back.

Words of prose are looked for in docs, docstrings and string literals (errors, help, metrics);
identifiers in the syntax tree; settings in the schema. Many replaced identifiers (`where`, `live`,
`parts`, `turn`) are English words, so they are no words of the first list.
"""

from __future__ import annotations

import ast
import dataclasses
import pathlib
import re

import pytest

from jaxvlm.config import Config

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "jaxvlm").rglob("*.py"))
OTHERS = ("benchmarks", "configs", "examples", "tests")
PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "launch/README.md")),
]

PROSE = {
    r"\bpictures?\b": "image",
    r"\bvectors?\b": "embedding",
    r"\bmade anew\b": "recomputed",
    r"\bencoded again\b": "re-encoded",
    r"\bforeseen\b": "predicted",
    r"\btrunks?\b": "frozen blocks",
    r"\bwarm tokens\b": "host cache",
    r"\blikewise\b": "say it again",
    r"\b(beside|behind) (it|them)\b": "next to, after, with",
    r"\bcontact sheets?\b": "prediction grid",
    r"\bspare_evaluations\b": "evict_for_eval",
}
PROSE_EXCEPTIONS = {
    ("jaxvlm/cache/store/codec.py", "vector"): "a processor's vector lanes",
    ("docs/glossary.md", "vector"): "what an embedding is, and its names elsewhere",
    ("jaxvlm/hf/peft_folder.py", "vector"): "PEFT's name of DoRA's tensors",
    ("jaxvlm/hf/families/peft_adapters.py", "vector"): "PEFT's name of DoRA's tensors",
    ("tests/e2e/test_lora.py", "vector"): "PEFT's name of DoRA's tensors",
}

IDENTIFIERS = {
    *("picture", "pictures", "num_pictures", "vectors", "of_vectors", "Vectors", "VectorConfig"),
    *("RunHooks", "Loaded", "Scorer", "Keeper", "Seen", "Recompute", "Room", "Warm", "warm"),
    *("Foreseen", "foreseen", "foresee", "settled", "Microbatched", "OnOwnRows", "Pipelined"),
    *("deal", "undeal", "Paired", "trunk", "ABOVE_TRUNK", "give_back", "mended"),
    *("row_version", "by_need", "at_once", "clip_norm", "final_share", "learning_rate_scale"),
    *("on_long", "on_bad", "share_pictures", "picture_pixels", "router_loss", "open_keeper"),
    *("reduce_bits", "gather_bits", "halvings"),
    *("Chunk", "grad_cache_chunks", "chunk_of", "tower_here", "VISION_PATHS", "say_once"),
    *("tell_bounds", "check_kept", "AUTO_CHUNK", "_said", "_behind"),
}
IDENTIFIER_EXCEPTIONS: dict[tuple[str, str], str] = {}

SETTINGS = {
    *("cache.bound", "cache.ahead", "cache.tolerance", "cache.refresh", "cache.at_once"),
    *("cache.alarm", "cache.trust", "cache.chunk", "cache.halvings", "cache.spare_evaluations"),
    *("cache.order", "cache.pictures", "tower", "vectors", "router_loss", "mesh.stage"),
    *("optim.final_share", "optim.clip_norm", "optim.learning_rate_scale"),
    *("data.on_long", "data.on_bad", "data.shift", "data.picture_pixels", "data.max_images"),
    *("pair_loss.partition", "pair_loss.negatives", "pair_loss.mask", "pair_loss.chunk"),
    *("strategy.reduce_bits", "strategy.gather_bits", "strategy.whole", "strategy.gathered"),
    *("strategy.chunks", "strategy.sequence", "model.vision.trunk"),
}


def texts_of(path: pathlib.Path) -> list[tuple[int, str]]:
    """Line and text of each string literal, docstrings and parts of f-strings included."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [
        (node.lineno, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


def problems(path: pathlib.Path, texts: list[tuple[int, str]]) -> list[str]:
    name = str(path.relative_to(ROOT))
    found = []
    for line, text in texts:
        for pattern, instead in PROSE.items():
            for match in re.finditer(pattern, text, re.IGNORECASE):
                word = match.group(0).lower().rstrip("s")
                if (name, word) not in PROSE_EXCEPTIONS:
                    found.append(f"{name}:{line}: {match.group(0)!r}; say {instead}")
    return found


@pytest.mark.parametrize("room", sorted({p.relative_to(ROOT).parts[1] for p in SOURCES}))
def test_strings_use_the_glossarys_words(room):
    paths = [p for p in SOURCES if p.relative_to(ROOT).parts[1] == room]
    found = [line for path in paths for line in problems(path, texts_of(path))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("folder", OTHERS)
def test_strings_outside_of_the_package_use_them_too(folder):
    paths = [p for p in sorted((ROOT / folder).rglob("*.py")) if p != pathlib.Path(__file__)]
    found = [line for path in paths for line in problems(path, texts_of(path))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_use_the_glossarys_words(page):
    lines = list(enumerate(page.read_text(encoding="utf-8").splitlines(), 1))
    found = problems(page, lines)
    assert not found, "\n".join(found)


def test_a_private_word_would_be_found(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    path = tmp_path / "x.py"
    path.write_text(
        'def f(x):\n    """Tokens made anew."""\n    raise ValueError(f"{x} pictures")\n'
    )
    assert len(problems(path, texts_of(path))) == 2


def names_of(path: pathlib.Path) -> set[str]:
    """Identifiers that a file defines, takes as parameters, or assigns."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return found


def test_replaced_identifiers_do_not_come_back():
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in SOURCES
        for name in sorted(names_of(path) & IDENTIFIERS)
        if (str(path.relative_to(ROOT)), name) not in IDENTIFIER_EXCEPTIONS
    ]
    assert not found, "\n".join(found)


def paths_of(config, prefix: str = "") -> set[str]:
    """``a.b`` of every setting and group of settings."""
    found = set()
    for field in dataclasses.fields(config):
        path, value = f"{prefix}{field.name}", getattr(config, field.name)
        found.add(path)
        if dataclasses.is_dataclass(value):
            found |= paths_of(value, f"{path}.")
    return found


def test_replaced_settings_do_not_come_back():
    assert not paths_of(Config()) & SETTINGS
    assert "cache.max_staleness" in paths_of(Config())  # the test reads the schema
