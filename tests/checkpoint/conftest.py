"""An object store on loopback, and what is short there."""

import re

import loopback_store
import pytest

from jaxvlm.checkpoint import manifest, run_lock
from jaxvlm.stores import store_requests


@pytest.fixture(scope="module")
def store(request, tmp_path_factory):
    """Google's, or the one that a test is parametrized by."""
    kind = loopback_store.KINDS[getattr(request, "param", "gs")]
    with loopback_store.store(tmp_path_factory.mktemp("store") / "files", kind) as made:
        yield made


@pytest.fixture
def url(request, store):
    store.wrong.clear()
    yield f"{store.scheme}://runs/{re.sub(r'[^a-z0-9_]', '-', request.node.name.lower())}"
    store.wrong.clear()


@pytest.fixture
def hasty(monkeypatch):
    """Deadlines of seconds; gcsfs does not wait between its own tries."""
    import gcsfs.retry

    async def at_once(seconds):
        pass

    monkeypatch.setattr(gcsfs.retry.asyncio, "sleep", at_once, raising=False)  # of all libraries
    monkeypatch.setattr(store_requests, "DEADLINE", 2.0)
    monkeypatch.setattr(store_requests, "_PAUSES", (0.1,))
    monkeypatch.setattr(manifest, "PAUSES", (0.1, 0.1))


@pytest.fixture
def brisk(monkeypatch):
    monkeypatch.setattr(run_lock, "BEAT", 0.2)
    monkeypatch.setattr(run_lock, "STALE", 1.5)
