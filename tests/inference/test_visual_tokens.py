"""Visual tokens of a loaded model's images are computed once and read from the cache after that."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import jax
import numpy as np
import pytest
from PIL import Image
from runs import finished_pair, free_port
from test_shared_prefixes import asked, drawn, vlm_of

from jaxvlm.config import ConfigError, MeshConfig
from jaxvlm.data.errors import DataError

MESHES = {
    "one": MeshConfig(data=1),
    "data": MeshConfig(data=2, fsdp=2, tensor=2),
    "pipeline": MeshConfig(data=2, pipeline=2),
}


def blinded(vlm):
    """Let the vision encoder give NaN from now on, wherever it runs."""

    def of(params):
        return {
            path: np.float32("nan") * x if path.startswith("vision/") else x
            for path, x in params.items()
        }

    vlm.params = of(vlm.params)
    if vlm.cache is not None:
        vlm.cache._params = {path: vlm.params[path] for path in vlm.cache._params}


@pytest.mark.parametrize("mesh", MESHES)
def test_answers_are_those_without_a_cache_and_nothing_is_encoded_twice(mesh):
    vlm, images = vlm_of(MESHES[mesh], trail=[6, 7, 8]), list(drawn(4))
    queries = asked(images)
    kv = {"kv": "vl_cache", "kv_budget": 0.2, "kv_queries": 200}
    wanted = [vlm.generate_batch(queries, max_new_tokens=6, **how) for how in ({}, kv)]
    assert len(set(wanted[0])) > 1
    vlm.use_cache(memory_mb=1)
    assert vlm.generate_batch(queries, max_new_tokens=6) == wanted[0]
    assert vlm.cache.counts.encoded == 4
    blinded(vlm)
    assert vlm.generate_batch(queries, max_new_tokens=6) == wanted[0]
    assert vlm.generate_batch(queries, max_new_tokens=6, **kv) == wanted[1]
    assert vlm.generate_batch(queries[:1], max_new_tokens=6) == wanted[0][:1]
    assert vlm.cache.counts.encoded == 4


def test_embeddings_are_those_without_a_cache():
    vlm, images = vlm_of(MESHES["one"]), drawn(3)
    queries = [([image], "what is it") for image in images]
    wanted = vlm.embed(queries)
    assert np.abs(wanted[0] - wanted[1]).max() > 1e-3
    vlm.use_cache(memory_mb=1)
    for order in ([0, 1, 2], [2, 0, 1]):
        found = vlm.embed([queries[i] for i in order])
        np.testing.assert_allclose(found, wanted[order], atol=1e-5)
    assert vlm.cache.counts == (3, 3)


def test_an_image_has_the_bits_that_it_has_alone():
    """Whichever images it came with when it was encoded, and from memory or from disk."""
    vlm, images = vlm_of(MESHES["data"]), list(drawn(5))

    def tokens(*batches):
        vlm.use_cache(memory_mb=1)
        for batch in batches:
            vlm.generate_batch([([image], "what is it") for image in batch], max_new_tokens=1)
        return {key: x.tobytes() for key, x in vlm.cache._tiers[0]._kept.items()}

    together = tokens(images)
    assert len(together) == 5
    assert together == tokens(*[[image] for image in reversed(images)])


def test_a_file_is_not_decoded_where_its_tokens_are_on_disk(tmp_path, monkeypatch):
    vlm, file = vlm_of(MESHES["one"]), str(tmp_path / "image.png")
    Image.fromarray(drawn(1)[0]).save(file)
    vlm.use_cache(store=tmp_path / "store")
    wanted = vlm.generate(file, "what is it", max_new_tokens=6)
    assert vlm.cache.counts == (0, 1)
    vlm.cache.close()

    def refuse(*_):
        raise AssertionError("decoded")

    monkeypatch.setattr("jaxvlm.data.images.image_files.decode", refuse)
    again = vlm_of(MESHES["one"])
    again.use_cache(store=tmp_path / "store")
    blinded(again)
    assert again.generate(file, "what is it", max_new_tokens=6) == wanted
    assert again.cache.counts == (1, 0)
    monkeypatch.undo()
    # Another encoder's tokens are not read, by however little it differs.
    other = vlm_of(MESHES["one"])
    path = next(p for p in sorted(other.params) if p.startswith("vision/"))
    flat = np.array(other.params[path])
    flat.flat[0] = np.nextafter(flat.flat[0], np.float32(9))
    other.params[path] = jax.device_put(flat, other.params[path].sharding)
    other.use_cache(store=tmp_path / "store")
    other.generate(file, "what is it", max_new_tokens=1)
    assert other.cache.counts == (0, 1)


def test_other_parameters_have_other_tokens(tmp_path):
    """Whoever sets them: what was cached of the others is not read, in memory or on disk."""
    vlm, image = vlm_of(MESHES["one"]), drawn(1)[0]
    vlm.use_cache(memory_mb=1, store=tmp_path)
    first = vlm.embed([([image], "what is it")])
    own, vlm.params = vlm.params, jax.tree.map(lambda x: -x, vlm.params)
    other = vlm.embed([([image], "what is it")])
    assert vlm.cache.counts == (0, 1)
    vlm.cache = None
    np.testing.assert_allclose(vlm.embed([([image], "what is it")]), other, atol=1e-5)
    vlm.params = own
    vlm.use_cache(store=tmp_path)
    np.testing.assert_array_equal(vlm.embed([([image], "what is it")]), first)
    assert vlm.cache.counts == (1, 0)
    vlm.use_cache(store=tmp_path)  # the one before is closed, and all of it on disk
    vlm.embed([([255 - image], "what is it")])
    vlm.use_cache(store=tmp_path)
    vlm.embed([([255 - image], "what is it")])
    assert vlm.cache.counts == (1, 0)


@pytest.mark.parametrize(
    ("image", "why"),
    [
        (np.zeros((0, 20, 3), np.uint8), "has no pixels"),
        (np.zeros((4, 4, 3), np.float32), "not an image"),
        ("", "is empty"),
    ],
)
def test_what_is_no_image_is_refused(image, why):
    vlm = vlm_of(MESHES["one"])
    with pytest.raises(DataError, match=why):
        vlm.generate([image], "what is it", max_new_tokens=1)
    assert vlm.generate_batch([]) == []


def test_a_changed_file_is_another_image(tmp_path):
    vlm, file = vlm_of(MESHES["one"]), tmp_path / "image.png"
    first, second = drawn(2)
    vlm.use_cache(memory_mb=1)
    for pixels in (first, second):
        Image.fromarray(pixels).save(file)
        vlm.generate(file, "what is it", max_new_tokens=1)
    assert vlm.cache.counts == (0, 2)
    # An image in memory is not taken for the file that would have its bytes.
    vlm.generate(second, "what is it", max_new_tokens=1)
    assert vlm.cache.counts == (0, 3)
    vlm.generate(Image.fromarray(second), "what is it", max_new_tokens=1)
    assert vlm.cache.counts == (1, 3)


def test_little_memory_holds_the_latest_images():
    vlm = vlm_of(MESHES["one"])
    images = drawn(3)
    vlm.use_cache(memory_mb=1)
    size = vlm.cache.tokens * vlm.cache.shape.width * 4
    vlm.cache._tiers[0]._room = 2 * size
    for i in (0, 1, 2, 2, 1, 0):
        vlm.generate(images[i], "what is it", max_new_tokens=1)
    assert vlm.cache.counts == (2, 4)


def test_settings_that_can_not_be_used(tmp_path):
    vlm = vlm_of(MESHES["one"])
    with pytest.raises(ConfigError, match="a cache needs room"):
        vlm.use_cache()
    with pytest.raises(ConfigError, match="cache_memory_mb=-1 must be a whole number"):
        vlm.use_cache(memory_mb=-1)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="a file is there"):
        vlm.use_cache(store=tmp_path / "file")


def test_tokens_that_are_not_finite_are_not_kept():
    vlm = vlm_of(MESHES["one"])
    blinded(vlm)
    vlm.use_cache(memory_mb=1)
    for _ in range(2):
        vlm.generate(drawn(1)[0], "what is it", max_new_tokens=1)
    assert vlm.cache.counts == (0, 2)


def test_bfloat16_tokens_are_those_of_the_model():
    vlm = vlm_of(MESHES["one"])
    config = dataclasses.replace(vlm.model.config, dtype="bfloat16")
    vlm.model = dataclasses.replace(vlm.model, config=config)
    vlm.use_cache(memory_mb=1)
    assert vlm.cache.shape.dtype == np.dtype("bfloat16")


TWO = """
import json, sys
from jaxvlm.parallel.distributed import processes
processes.initialize()
import jax
import test_shared_prefixes as shared
from jaxvlm.config import MeshConfig

shared.devices_of = lambda mesh: jax.devices()
with processes.guard_peers():
    vlm = shared.vlm_of(MeshConfig(data=4), trail=[6, 7, 8])
    queries = shared.asked(list(shared.drawn(4)))
    wanted = vlm.generate_batch(queries, max_new_tokens=6)
    found = []
    for how in ({"memory_mb": 1}, {"store": sys.argv[1]}):
        vlm.use_cache(**how)
        found.append(vlm.generate_batch(queries, max_new_tokens=6))
        if jax.process_index() and "memory_mb" in how:  # one process has nothing left
            vlm.cache._tiers[0]._kept.clear()
        found.append(vlm.generate_batch(queries[::-1], max_new_tokens=6)[::-1])
    print(json.dumps([wanted, found, vlm.cache.counts]), flush=True)
"""


@pytest.mark.long
def test_processes_encode_together_whatever_each_has_cached(tmp_path):
    here, port = pathlib.Path(__file__).parent, free_port()
    both = {
        "JAXVLM_COORDINATOR": f"127.0.0.1:{port}",
        "JAXVLM_NUM_PROCESSES": "2",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "PYTHONPATH": f"{here}:{here.parent}:{here.parents[1]}",
    }
    of = [both | {"JAXVLM_PROCESS_ID": str(i)} for i in range(2)]
    for said in finished_pair(TWO, str(tmp_path), of=of.__getitem__):
        wanted, found, counts = json.loads(said.splitlines()[-1])
        assert len(set(wanted)) > 1 and found == [wanted] * 4
        assert counts == [4, 4]  # of the store: what one wrote both would read
