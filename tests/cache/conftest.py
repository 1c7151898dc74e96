"""A store in a folder of the test's own."""

from __future__ import annotations

import pytest
from stored import FACTS

from jaxvlm.cache.store.rows import Store


@pytest.fixture
def opened(tmp_path):
    """``opened()``: the store in ``tmp_path / "store"``; its warnings are in ``opened.said``."""
    stores, said = [], []

    def open_store(facts=FACTS, name="exact", **more) -> Store:
        stores.append(Store(tmp_path / "store", facts, name, on_warning=said.append, **more))
        return stores[-1]

    open_store.said = said
    yield open_store
    for store in stores:
        store.close()
