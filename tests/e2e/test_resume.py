"""Resumed on another mesh, with other settings, or told to stop: the run goes on as it was.

Kills at any moment are in tests/kills.
"""

from __future__ import annotations

import json
import shutil
import signal
import time

import jax
import numpy as np
import pytest
import runs
from numerics import close
from runs import finish, losses

import jaxvlm
from jaxvlm.checkpoint.checkpointer import Checkpointer, CheckpointError, restore_params
from jaxvlm.config import ConfigError, MeshConfig
from jaxvlm.data.errors import DataError

DROPOUT = 0.1
"""Whatever happens to a run, its masks stay the same."""


def recipe(data):
    config = runs.recipe(data)
    config.model.decoder.dropout = DROPOUT
    return config


def start(*args, **env):
    return runs.start(*args, f"--config.model.decoder.dropout={DROPOUT}", **env)


def saved_with(run):
    folder = run.workdir / "checkpoints"
    with Checkpointer(folder, 3, "exact_match", "max", on_warning=pytest.fail) as checkpointer:
        return checkpointer.restore(run.training.checkpointed(run.training.abstract)).extra


def weights(run):
    found = restore_params(run.workdir / "checkpoints", run.model.abstract(), "latest")
    return {path: np.asarray(x) for path, x in found.items()}


@pytest.fixture(scope="module")
def unbroken(data, tmp_path_factory):
    run = jaxvlm.Trainer(recipe(data), tmp_path_factory.mktemp("unbroken"))
    result = run.fit()
    assert result["ended"] == "done" and result["step"] == 12
    return run


@pytest.mark.parametrize(
    "shape, devices",
    [
        ((1, 2, 2), 4),
        pytest.param((4, 1, 1), 4, marks=pytest.mark.long),
        pytest.param((2, 2, 1), 4, marks=pytest.mark.long),
    ],
)
def test_resume_onto_another_mesh(data, unbroken, tmp_path, shape, devices):
    config = recipe(data)
    config.steps = 6
    jaxvlm.Trainer(config, tmp_path).fit()
    config.steps = 12
    config.mesh.data, config.mesh.fsdp, config.mesh.tensor = shape
    result = jaxvlm.Trainer(config, tmp_path, devices=jax.devices()[:devices]).fit()
    assert result["step"] == 12
    expected, got = losses(unbroken.workdir), losses(tmp_path)
    assert got.keys() == expected.keys() == set(range(1, 13))
    for step in range(7, 13):
        close(got[step], expected[step], 1e-5, step)


@pytest.mark.long
def test_the_tower_moves_to_devices_of_its_own_and_back(data, unbroken, tmp_path):
    config = recipe(data)
    for steps, apart in ((4, 2), (8, 0), (12, -1)):
        config.steps, config.encoder.devices = steps, apart
        if steps == 12:
            config.data.eval = config.data.train  # evaluated on the decoder's devices
        run = jaxvlm.Trainer(config, tmp_path, devices=jax.devices()[: 4 if apart == 2 else 2])
        result = run.fit()
    assert result["step"] == 12 and "exact_match" in result
    assert run.config.encoder.devices == 1  # of two
    assert run.generate([np.zeros((16, 16, 3), np.uint8)], "is it red?") is not None
    expected, got = losses(unbroken.workdir), losses(tmp_path)
    assert got.keys() == expected.keys()
    for step, value in expected.items():
        close(got[step], value, 1e-5, step)


@pytest.mark.long
def test_sigterm_saves_and_the_run_goes_on(data, unbroken, tmp_path):
    long = ("--config.steps=100000", "--config.checkpoint.every=0")
    # As launched jobs ask, which are then started again; by itself it ends with 0.
    process = start(tmp_path, data, "--json", *long, JAXVLM_STOPPED_STATUS="75")
    wait_for_step(tmp_path, 5, process)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 75, err[-2000:]
    result = json.loads(out.splitlines()[-1])
    assert result["ended"] == "preempted" and result["step"] >= 5
    config = recipe(data)
    config.steps = result["step"] + 2
    again = jaxvlm.Trainer(config, tmp_path)
    assert again.fit()["step"] == result["step"] + 2
    first = losses(tmp_path)
    for step in range(1, 13):
        if step in first:
            np.testing.assert_allclose(
                first[step], losses(unbroken.workdir)[step], rtol=0, atol=1e-6, err_msg=step
            )


def wait_for_step(workdir, step, process, timeout=120):
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[1][-3000:]
        path = workdir / "metrics.jsonl"
        if path.exists() and len(path.read_text().splitlines()) >= step:
            return
        time.sleep(0.01)
    raise AssertionError(f"no step {step} within {timeout} s")


def test_changed_data_is_refused(data, unbroken, tmp_path):
    config = recipe(data)
    config.steps = 3
    jaxvlm.Trainer(config, tmp_path).fit()
    before = (tmp_path / "config.json").read_text()
    config.steps, config.data.batch_size = 6, 16
    with pytest.raises(ValueError, match=r"data\.batch_size 8 -> 16"):
        jaxvlm.Trainer(config, tmp_path).fit()
    config.data.batch_size, config.optim.frozen = 8, ("vision/*",)
    with pytest.raises(CheckpointError, match="if the model is the same, a new workdir"):
        jaxvlm.Trainer(config, tmp_path).fit()
    assert (tmp_path / "config.json").read_text() == before, "the run is what it was"


@pytest.mark.long
def test_init_from_takes_weights_and_nothing_else(data, unbroken, tmp_path):
    config = recipe(data)
    config.init_from, config.steps = str(unbroken.workdir), 3
    config.optim.learning_rate = 1e-12
    run = jaxvlm.Trainer(config, tmp_path)
    assert run.fit()["step"] == 3
    for path, value in weights(unbroken).items():
        np.testing.assert_allclose(weights(run)[path], value, atol=1e-9, err_msg=path)


def test_init_from_another_model_is_refused(data, unbroken, tmp_path):
    config = recipe(data)
    config.init_from, config.model.decoder.rope_theta = str(unbroken.workdir), 500.0
    with pytest.raises(ConfigError, match=r"rope_theta: 10000\.0 -> 500\.0"):
        jaxvlm.Trainer(config, tmp_path).fit()


def test_a_mesh_of_too_many_devices_is_refused(data):
    config = recipe(data)
    config.mesh.data = 16
    with pytest.raises(ConfigError, match="does not fit 8 devices"):
        jaxvlm.Trainer(config)
    assert MeshConfig().data == -1


def test_early_stop_survives_the_same_command(data, tmp_path):
    config = recipe(data)
    config.data.eval, config.eval_every, config.early_stop = str(data), 3, 1
    config.optim.learning_rate, config.steps = 1e-12, 60
    first = jaxvlm.Trainer(config, tmp_path).fit()
    assert first["ended"] == "no better" and first["step"] == 6
    assert "blind/exact_match" in first and (tmp_path / "predictions.png").is_file()
    again = jaxvlm.Trainer(config, tmp_path).fit()
    assert again["ended"] == "no better" and again["step"] == 6


def test_a_resume_without_evaluation_keeps_the_best_score(data, tmp_path):
    config = recipe(data)
    config.data.eval, config.eval_every, config.steps = str(data), 3, 3
    run = jaxvlm.Trainer(config, tmp_path)
    run.fit()
    before = saved_with(run)
    config.data.eval, config.eval_every, config.steps = "", 0, 6
    jaxvlm.Trainer(config, tmp_path).fit()
    after = saved_with(run)
    assert before["evaluated"] == 3 and after["data"] != before["data"]
    assert before == after | {"data": before["data"]}


def test_half_written_files_of_a_killed_start_do_no_harm(data, tmp_path):
    config = recipe(data)
    config.steps = 3
    jaxvlm.Trainer(config, tmp_path).fit()
    (tmp_path / "tokenizer.tmp").mkdir()
    (tmp_path / "config.json").write_text('{"config": {')
    config.steps = 6
    assert jaxvlm.Trainer(config, tmp_path).fit()["step"] == 6
    assert jaxvlm.load(tmp_path).generate([], "is it red?", max_new_tokens=2) is not None


def test_a_start_that_ended_before_config_json_blocks_nothing(data, tmp_path):
    """Killed, or refused for its evaluation data: the same command with the fault mended trains."""
    config = recipe(data)
    config.steps, config.data.eval = 3, str(tmp_path / "typo.jsonl")
    run = jaxvlm.Trainer(config, tmp_path / "run")
    with pytest.raises(DataError, match="no such file"):
        run.fit()
    assert (tmp_path / "run" / "checkpoints").is_dir()
    assert not (tmp_path / "run" / "config.json").exists()
    config.data.eval = ""
    assert jaxvlm.Trainer(config, tmp_path / "run").fit()["step"] == 3
    shutil.rmtree(tmp_path / "run" / "tokenizer")
    with pytest.raises(ConfigError, match="is missing, but its run has checkpoints"):
        jaxvlm.Trainer(config, tmp_path / "run")


def test_an_address_is_no_folder(data):
    for field in ("workdir", "init_from"):
        config = recipe(data)
        config.init_from = "az://bucket/run" if field == "init_from" else ""
        with pytest.raises(ConfigError, match="gs://BUCKET/FOLDER"):
            jaxvlm.Trainer(config, "az://bucket/run" if field == "workdir" else "")


@pytest.mark.long
def test_clipping_can_be_switched_on_when_resuming(data, tmp_path):
    config = recipe(data)
    config.steps, config.optim.max_grad_norm = 3, 0.0
    jaxvlm.Trainer(config, tmp_path).fit()
    config.steps, config.optim.max_grad_norm = 6, 1.0
    assert jaxvlm.Trainer(config, tmp_path).fit()["step"] == 6


@pytest.mark.parametrize(
    ("group", "name", "value"),
    [
        ("decoder", "rope_theta", 500.0),
        ("decoder", "activation", "relu"),
        ("vision", "pixel_mean", (0.1, 0.1, 0.1)),
        ("vision", "norm_eps", 1e-3),
        ("tokenizer", "kind", "bpe"),
        ("tokenizer", "vocab_size", 300),
        ("tokenizer", "path", "another/folder"),
    ],
)
def test_another_model_of_the_same_shapes_does_not_go_on(data, unbroken, group, name, value):
    before = (unbroken.workdir / "config.json").read_bytes()
    config = recipe(data)
    setattr(getattr(config if group == "tokenizer" else config.model, group), name, value)
    config.steps = 14
    changed = jaxvlm.Trainer(config, unbroken.workdir)
    with pytest.raises(
        ConfigError, match=rf"model or its tokenizer changed .*{group}\.{name}: .* -> "
    ):
        changed.fit()
    assert (unbroken.workdir / "config.json").read_bytes() == before


def test_a_missing_evaluation_image_harms_neither_control_nor_grid(data, tmp_path):
    lines = data.read_text().splitlines()
    gone = lines[0].replace("0.png", "gone.png").replace('"id": "', '"id": "gone-')
    path = data.parent / "one_gone.jsonl"
    path.write_text("\n".join([gone, *lines]) + "\n")
    config = recipe(data)
    config.data.eval, config.data.max_skip_fraction, config.steps = str(path), 0.02, 3
    result = jaxvlm.Trainer(config, tmp_path).fit()
    assert result["answers"] == result["blind/answers"] == 80
    assert (tmp_path / "predictions.png").is_file()


@pytest.mark.long
def test_a_setting_of_jax_that_changes_results_belongs_to_the_run(data, tmp_path):
    """It is told, recorded, and the same after a resume; what jaxvlm can't compute with is not."""
    args = ("--config.steps=4", "--config.data.eval=", "--config.checkpoint.every=4")
    odd = {"JAX_DEFAULT_PRNG_IMPL": "rbg", "devices": 1}
    told = finish(runs.start(tmp_path / "run", data, *args, **odd))
    assert "JAX_DEFAULT_PRNG_IMPL=rbg may change results" in told
    recorded = json.loads((tmp_path / "run" / "config.json").read_text())["numeric_settings"]
    assert recorded["JAX_DEFAULT_PRNG_IMPL"] == "rbg"

    def refused(workdir, **env):
        process = runs.start(workdir, data, *args, "--config.steps=6", devices=1, **env)
        _, err = process.communicate(timeout=300)
        assert process.returncode == 2, err[-2000:]
        return err.strip().splitlines()[-1]

    line = refused(tmp_path / "run")
    assert "JAX_DEFAULT_PRNG_IMPL was rbg when this run began, and is not set" in line
    assert "JAX_ENABLE_X64=True is set" in refused(tmp_path / "x64", JAX_ENABLE_X64="1")
    strict = refused(tmp_path / "strict", JAX_NUMPY_DTYPE_PROMOTION="strict")
    assert "JAX_NUMPY_DTYPE_PROMOTION=strict is set" in strict
    assert "train 6/6" in finish(
        runs.start(tmp_path / "run", data, *args, "--config.steps=6", **odd)
    )
