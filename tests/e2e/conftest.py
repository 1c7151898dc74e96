"""Fixtures of whole runs; the functions are in runs.py, which tests import too."""

import json

import pytest
from runs import COLORS, write_data


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def captions(tmp_path_factory):
    """Images of one colour and what to call them; three in a batch would be too many."""
    folder = tmp_path_factory.mktemp("captions")
    write_data(folder)
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
