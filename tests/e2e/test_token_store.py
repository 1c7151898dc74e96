"""Tokens kept on disk and in host memory: other runs find them, and never a wrong one."""

from __future__ import annotations

import shutil

import jax
import numpy as np
import pytest
from numerics import close
from runs import losses
from test_cache import assert_same_run, made, metric

import jaxvlm
from jaxvlm.cache.identity import TOKENS_VERSION, identity
from jaxvlm.cache.store import maintenance
from jaxvlm.cache.store.rows import Store
from jaxvlm.cache.store.segment_files import Identity
from jaxvlm.cli.main import run as cli
from jaxvlm.config import ConfigError

ONE = {"devices": jax.devices()[:1]}


def run(data, folder, store, **cache):
    config = made(data, "strict", encode_batch=2, store=str(store), **cache)
    found = jaxvlm.Trainer(config, folder, **ONE)
    found.fit()
    return found


def said(capsys):
    return "".join(capsys.readouterr())


@pytest.fixture(scope="module")
def first(data, tmp_path_factory):
    """A run that fills a store."""
    folder = tmp_path_factory.mktemp("first")
    return run(data, folder / "run", folder / "store"), folder / "store"


def test_a_second_run_finds_what_the_first_made(first, data, tmp_path, capsys):
    done, store = first
    assert metric(done, "train/cache/hit_rate")[0] == 0
    again = run(data, tmp_path / "again", store)
    assert_same_run(done, again)
    assert set(metric(again, "train/cache/from_store")) == {1.0}
    assert set(metric(again, "train/cache/encoded")) == {0.0}
    assert "40 images of this vision encoder" in said(capsys)
    config = made(data, encode_batch=2)
    config.cache.policy = "strict"
    plain = jaxvlm.Trainer(config, tmp_path / "plain", **ONE)
    plain.fit()  # another program: the same to rounding
    for step, value in losses(plain.workdir).items():
        close(losses(again.workdir)[step], value, 1e-5)


def test_images_that_are_found_are_not_decoded(first, data, tmp_path, monkeypatch):
    done, store = first

    def refuse(*_):
        raise AssertionError("decoded")

    monkeypatch.setattr("jaxvlm.data.images.image_files.decode", refuse)
    config = made(data, "strict", encode_batch=2, store=str(store))
    config.data.eval, config.eval_every = "", 0
    again = jaxvlm.Trainer(config, tmp_path / "again", **ONE)
    again.fit()
    assert losses(again.workdir) == losses(done.workdir)


def test_damage_and_part_of_a_store(first, data, tmp_path):
    """Flipped bits: what is left is read, the rest made and kept again."""
    done, store = first
    copy = tmp_path / "store"
    shutil.copytree(store, copy)
    path = next(copy.rglob("*.safetensors"))
    raw = bytearray(path.read_bytes())
    for place in (len(raw) // 3, len(raw) // 2, len(raw) - 9):
        raw[place] ^= 4
    path.write_bytes(raw)
    again = run(data, tmp_path / "again", copy)
    assert_same_run(done, again)
    share = metric(again, "train/cache/from_store")
    assert min(share) < 1 and max(share[:3]) > 0.5 and share[-1] == 1
    third = run(data, tmp_path / "third", copy)
    assert set(metric(third, "train/cache/from_store")) == {1.0}


@pytest.mark.long
def test_a_store_in_another_order(first, data, tmp_path):
    """What was kept row by row is found by a run that wants it in Morton order, as if by itself."""
    done, store = first
    alone = run(data, tmp_path / "alone", tmp_path / "store", token_order="morton")
    other = run(data, tmp_path / "other", store, token_order="morton")
    assert_same_run(alone, other)
    assert metric(alone, "train/cache/from_store")[0] == 0
    assert set(metric(other, "train/cache/from_store")) == {1.0}
    back = run(data, tmp_path / "back", tmp_path / "store")
    assert_same_run(done, back)
    assert set(metric(back, "train/cache/from_store")) == {1.0}


@pytest.mark.long
def test_another_mesh_finds_them(first, data, tmp_path):
    done, store = first
    config = made(data, "strict", encode_batch=2, store=str(store))
    wide = jaxvlm.Trainer(config, tmp_path / "wide", devices=jax.devices()[:4])
    wide.fit()
    assert set(metric(wide, "train/cache/from_store")) == {1.0}
    for step, value in losses(done.workdir).items():
        close(losses(wide.workdir)[step], value, 1e-5)


@pytest.mark.parametrize(
    "what",
    [
        "weights",
        "resize",
        *(pytest.param(x, marks=pytest.mark.long) for x in ("encode_batch", "dtype")),
    ],
)
def test_of_another_tower_nothing_is_found(first, data, tmp_path, what):
    _, store = first
    config = made(data, "strict", encode_batch=2, store=str(store))
    config.steps = 4
    if what == "resize":
        config.data.resize = "pad"
    if what == "encode_batch":
        config.cache.encode_batch = 4
    if what == "dtype":
        config.model.dtype = "bfloat16"
    other = jaxvlm.Trainer(config, tmp_path / "other", **ONE)
    if what == "weights":
        init = other.training.init

        def nudged(params):
            path = next(p for p in sorted(params) if p.startswith("vision/"))
            flat = np.array(params[path])
            flat.flat[0] = np.nextafter(flat.flat[0], np.float32(9))  # by one ulp
            return init({**params, path: jax.device_put(flat, params[path].sharding)})

        object.__setattr__(other.training, "init", nudged)
    other.fit()
    assert metric(other, "train/cache/from_store")[0] == 0


def test_what_the_identity_is_of(first, monkeypatch):
    """All that determines tokens, and the version of what computes them; no file of the code."""
    done, store = first
    inputs, params = done.cache_inputs, done.model.init(done.config.seed)
    images = (inputs.dataset.preparation, inputs.pages.windows)
    made_by = identity(inputs.config, inputs.model, *images, params, 2)
    assert (store / Identity.of(made_by, "exact").name).is_dir()
    of_the_tower = {"weights", "vision_encoder", "width", "pooled", "adapters", "images"}
    of_the_code = {"tokens_version", "libraries"}
    of_the_machine = {"platform", "jax", "flags", "dtype", "attention", "sharding", "encode_batch"}
    assert made_by.keys() == of_the_tower | of_the_code | of_the_machine
    assert made_by["tokens_version"] == TOKENS_VERSION
    monkeypatch.setattr("jaxvlm.cache.identity.TOKENS_VERSION", TOKENS_VERSION + 1)
    raised = identity(inputs.config, inputs.model, *images, params, 2)
    assert not (store / Identity.of(raised, "exact").name).exists()


def test_trust_of_weights_alone(first, data, tmp_path, capsys):
    _, store = first
    for encode_batch, found in ((2, 0.0), (4, 1.0)):
        config = made(
            data, "strict", encode_batch=encode_batch, store=str(store), identity="weights"
        )
        config.steps = 4
        other = jaxvlm.Trainer(config, tmp_path / str(encode_batch), **ONE)
        other.fit()
        assert metric(other, "train/cache/from_store")[0] == found
    assert "encoded on any kind of machine" in said(capsys)


def test_a_loaded_model_reads_what_its_run_wrote(first, data, capsys):
    """And changes nothing of it: its own tokens, of another encode batch, would lie next to it."""
    done, store = first
    before = {path: path.read_bytes() for path in store.rglob("*.safetensors")}
    model = jaxvlm.load(done.workdir)
    plain = model.evaluate(str(data), limit=8)
    model.use_cache(store=store)
    found = model.evaluate(str(data), limit=8)
    assert found.metrics["exact_match"] == plain.metrics["exact_match"]
    close(found.metrics["loss"], plain.metrics["loss"], 1e-5)
    read, encoded = model.cache.counts
    assert read and not encoded
    command = ["eval", f"--checkpoint={done.workdir}", f"--data={data}"]
    answers = ["--limit=8", "--kv=random", "--kv_budget=1", f"--cache_store={store}"]
    assert cli([*command, *answers]) == 0
    assert " images read, 0 encoded" in said(capsys)
    assert before == {path: path.read_bytes() for path in store.rglob("*.safetensors")}
    assert cli([*command, "--classes=red,blue", f"--cache_store={store}"]) == 2
    assert "--cache_store does not go with --classes" in said(capsys)


@pytest.mark.long
def test_memory_alone(first, data, tmp_path):
    done, _ = first
    config = made(data, "strict", encode_batch=2, memory_mb=64, max_images=16)
    here = jaxvlm.Trainer(config, tmp_path / "run", **ONE)
    here.fit()
    stored = metric(here, "train/cache/from_store")
    assert stored[0] == 0 and stored[-1] == 1
    for step, value in losses(here.workdir).items():
        close(losses(done.workdir)[step], value, 1e-5)


def test_tokens_are_audited(first, data, tmp_path, capsys, monkeypatch):
    """A store whose tokens are wrong though nothing says so: the alarm does."""
    _, store = first
    good = run(data, tmp_path / "good", store, refresh_fraction=0.5)
    assert max(metric(good, "train/cache/drift_max")) <= 1e-6
    assert "differ by" not in said(capsys)
    config = made(data, "strict", encode_batch=2, store=str(store), refresh_fraction=0.5)
    bad = jaxvlm.Trainer(config, tmp_path / "bad", **ONE)
    get = Store.get

    def wrong(self, key):
        found = get(self, key)
        return None if found is None else found * np.float32(1.01)

    monkeypatch.setattr(Store, "get", wrong)
    bad.fit()
    assert max(metric(bad, "train/cache/drift_max")) == pytest.approx(0.01, rel=0.05)
    assert "differ by 0.0099" in said(capsys)


def test_a_store_that_can_not_be_written(data, tmp_path, capsys, first, monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    done, _ = first
    monkeypatch.setattr("jaxvlm.cache.store.segment_files.write_whole", refuse)
    again = run(data, tmp_path / "run", tmp_path / "store")
    assert losses(again.workdir) == losses(done.workdir)
    assert "the run goes on" in said(capsys)


def test_lossy_tokens_in_a_store(first, data, tmp_path):
    done, _ = first
    once = run(data, tmp_path / "once", tmp_path / "store", codec="int8")
    twice = run(data, tmp_path / "twice", tmp_path / "store", codec="int8")
    assert losses(twice.workdir) != losses(done.workdir)
    for step, value in losses(done.workdir).items():
        assert abs(losses(twice.workdir)[step] - value) <= 0.02 * abs(value)
    # What a run made is for the next: this one must not depend on when a thread was done.
    assert set(metric(once, "train/cache/from_store")) == {0.0}
    assert losses(once.workdir) == losses(done.workdir)
    assert set(metric(twice, "train/cache/from_store")) == {1.0}
    (found,) = maintenance.stat(tmp_path / "store")
    assert found.rows == 40 and found.codec == "int8"
    files = sum(path.stat().st_size for path in (tmp_path / "store").rglob("*.safetensors"))
    assert set(metric(twice, "train/cache/disk_mib")) == {files / 2**20}


def test_lossy_tokens_of_a_run_that_is_stopped(first, data, tmp_path):
    """What it wrote before is not read when it goes on: its losses are the unbroken run's."""
    done, _ = first
    config = made(data, "strict", encode_batch=2, store=str(tmp_path / "store"), codec="int8")
    for steps in (7, config.steps):
        config.steps = steps
        gone_on = jaxvlm.Trainer(config, tmp_path / "run", **ONE)
        gone_on.fit()
    assert losses(gone_on.workdir) == losses(done.workdir)
    assert set(metric(gone_on, "train/cache/from_store")) == {0.0}
    assert sum(checked.rows for checked in maintenance.verify(tmp_path / "store")) == 40


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"store": "x", "policy": "off"}, "config.cache.store='x' is not read without a policy"),
        ({"codec": "int8"}, "config.cache.codec='int8' is not read without a store"),
        ({"store": "x", "codec": "int5"}, "known: exact, int8"),
        ({"store": "x", "identity": "me"}, "known: all, weights"),
        ({"store": "x", "learns": True}, "freeze the encoder"),
        ({"store": __file__}, "a file is there; give a folder"),
        ({"refresh_fraction": float("nan")}, "must be a finite number"),
        ({"policy": "lazy", "max_staleness": 10**13, "learns": True}, "at most"),
        ({"store": "gs://x/y"}, "this can't be in an object store"),
        (
            {"policy": "hybrid", "max_staleness": 4, "refresh_fraction": 0.1, "learns": True},
            "gradients would be biased",
        ),
        ({"policy": "adaptive", "learns": True}, "nothing to choose"),
        ({"refresh_fraction": 0.1, "learns": True}, "leave it at 0"),
        ({"drift_warning": 0.1}, "is not read without refresh"),
        ({"memory_mb": 1, "learns": True}, "policy=.strict., a staleness limit of 0"),
    ],
)
def test_refused(data, settings, words):
    settings = {"policy": "strict", **settings}
    config = made(data, settings.pop("policy"), not settings.pop("learns", False), **settings)
    with pytest.raises(ConfigError, match=words):
        jaxvlm.Trainer(config, **ONE)
