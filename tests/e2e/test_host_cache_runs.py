"""Runs that keep tokens of a tower that learns in host memory: they go on to the same bits."""

from __future__ import annotations

import json
import shutil

import jax
import pytest
from numerics import close
from runs import finish, losses, start
from test_cache import assert_same_run, made, metric
from test_two_processes import together

import jaxvlm
from jaxvlm.config import ConfigError

pytestmark = pytest.mark.long
PLACES = 16
"""Of 40 images as many have pages on the devices, where not said otherwise."""


def run(config, folder, steps=12, devices=1):
    config.steps = steps
    config.checkpoint.every, config.checkpoint.keep = 4, 3
    out = jaxvlm.Trainer(config, folder, devices=jax.devices()[:devices])
    out.fit()
    return out


def aging(data, policy="lazy", **cache):
    settings = {
        "max_staleness": 50,
        "max_images": PLACES,
        "memory_mb": 1,
        "encode_batch": 2,
    } | cache
    return made(data, policy, False, **settings)


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    return run(aging(data), tmp_path_factory.mktemp("whole"), 24)


def test_images_without_pages_are_found(data, whole, tmp_path, capsys):
    """Without host memory 16 of 40 are found when all are shown again; with it all but those
    that were made a step before they are shown again.
    """
    found = metric(whole, "train/cache/hit_rate")
    assert found[0] == 0 and found[-1] == 1
    kept = metric(whole, "train/cache/host_mib")
    assert 0 < kept[-1] < 1 and kept == sorted(kept)
    without = run(aging(data, memory_mb=0), tmp_path / "without", 24)
    assert max(metric(without, "train/cache/hit_rate")) < 1
    assert sum(metric(without, "train/cache/hit_rate")) < 0.6 * sum(found)
    capsys.readouterr()
    jaxvlm.Trainer(
        aging(data, max_images=PLACES + 3), tmp_path / "again", devices=jax.devices()[:1]
    )
    said = capsys.readouterr().out
    assert f"room for {PLACES} images (of {PLACES + 3}: as many for each sequence of" in said
    assert "; for 24 in host memory" in said
    # Of a tower that learns, so old tokens are not those of the run that keeps fewer.
    assert losses(without.workdir) != losses(whole.workdir)


def test_stopped_and_gone_on(data, whole, tmp_path):
    for _ in range(2):  # the second time with nothing to do: it loses nothing
        run(aging(data), tmp_path / "run", 15)
    again = run(aging(data), tmp_path / "run", 24)
    assert metric(again, "train/cache/hit_rate") == metric(whole, "train/cache/hit_rate")
    assert_same_run(whole, again)


def test_two_processes_and_one_goes_on(data, tmp_path):
    """Each keeps its own rows' images; one on another mesh takes what either wrote."""

    def args(steps, memory, fsdp=2):
        cache = {
            "policy": "lazy",
            "max_staleness": 50,
            "max_images": PLACES,
            "memory_mb": memory,
            "encode_batch": 2,
        }
        return (
            *("--config.mesh.data=4", f"--config.mesh.fsdp={fsdp}", f"--config.steps={steps}"),
            *("--config.data.flip=False", "--config.data.max_shift=0"),
            *("--config.optim.schedule=constant", "--config.checkpoint.every=4"),
            *(f"--config.cache.{name}={value}" for name, value in cache.items()),
        )

    alone, both = tmp_path / "alone", tmp_path / "both"
    said = finish(start(alone, data, *args(16, 2)))
    assert "; for 24 in host memory" in said
    processes = together(both, data, *args(7, 1))
    try:
        for process in processes:
            finish(process)
    finally:
        for process in processes:
            process.kill()
    assert {path.name for path in (both / "host_cache" / "7").iterdir()} == {"0-of-2", "1-of-2"}
    assert "are recomputed" not in finish(start(both, data, *args(16, 2, 1), devices=4))
    assert found_in(both) == found_in(alone)
    for step, value in losses(alone).items():
        close(losses(both)[step], value, 1e-5, step)


def found_in(workdir):
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [row["train/cache/hit_rate"] for row in map(json.loads, lines) if "train/loss" in row]


def test_what_was_saved_is_gone(data, whole, tmp_path, capsys):
    run(aging(data), tmp_path / "run", 14)
    saved = tmp_path / "run" / "host_cache"
    assert {"8", "12", "14"} <= {path.name for path in saved.iterdir()}  # as the checkpoints
    shutil.rmtree(saved / "14")
    capsys.readouterr()
    again = run(aging(data), tmp_path / "run", 24)
    assert "of 1 of 1 processes, which can't be read (No such file" in "".join(capsys.readouterr())
    found, unbroken = (metric(x, "train/cache/hit_rate") for x in (again, whole))
    assert found[:14] == unbroken[:14] and sum(found) < sum(unbroken) and found[-1] == 1
    assert not {"4", "8"} & {path.name for path in saved.iterdir()}


def test_gone_on_with_other_settings(data, whole, tmp_path, capsys):
    """In another order what is kept is found; without host memory that is said, and put away."""
    run(aging(data), tmp_path / "run", 15)
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    again = run(aging(data, token_order="morton"), tmp_path / "run", 24)
    stored, unbroken = (metric(x, "train/cache/from_store") for x in (again, whole))
    assert stored == unbroken and sum(stored[15:]) > 0
    capsys.readouterr()
    run(aging(data, memory_mb=0), tmp_path / "other", 24)
    assert "not used, because these settings keep none there" in "".join(capsys.readouterr())
    left = {path.name for path in (tmp_path / "other" / "host_cache").iterdir()}
    assert left <= {"15", "16", "20"}


def test_adaptive_with_draws(data, tmp_path):
    config = aging(data, "adaptive", drift_threshold=0.75, refresh_fraction=0.25, max_images=8)
    whole = run(config, tmp_path / "whole", 24)
    assert 0 < max(metric(whole, "train/cache/hit_rate")) < 1
    assert max(metric(whole, "train/cache/drift_max")) > 0
    run(config, tmp_path / "run", 15)
    assert_same_run(whole, run(config, tmp_path / "run", 24))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"policy": "strict", "max_staleness": 1},
            "policy='strict', a staleness limit of 0 and a trained",
        ),
        (
            {"policy": "lazy", "max_staleness": 0},
            "policy='lazy', a staleness limit of 0 and a trained",
        ),
        (
            {"max_images": 0},
            "all images have pages on the devices; set config.cache.max_images (0) to how",
        ),
        ({"store": "tokens"}, "config.cache.store with a trained vision encoder"),
    ],
)
def test_refused(data, tmp_path, settings, message):
    with pytest.raises(ConfigError, match=r"config\.cache") as error:
        jaxvlm.Trainer(aging(data, **settings), tmp_path, devices=jax.devices()[:1])
    assert message in str(error.value)
