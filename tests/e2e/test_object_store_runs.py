"""A run whose folder is in an object store is the run that it would be on a disk."""

import time

import jax
import loopback_store
import numpy as np
import pytest
import runs
from loopback_store import both
from numerics import close
from test_two_processes import together

import jaxvlm
from jaxvlm.checkpoint import run_folder
from jaxvlm.cli.main import run as cli
from jaxvlm.stores.object_store import RemoteFolder


class Stop(jaxvlm.Callback):
    """An error in the middle of a run."""

    def on_step_end(self, step, metrics):
        if step == 5:
            raise ZeroDivisionError


@pytest.fixture(scope="module")
def store(request, tmp_path_factory):
    kind = loopback_store.KINDS[getattr(request, "param", "gs")]
    with loopback_store.store(tmp_path_factory.mktemp("store") / "files", kind) as made:
        yield made


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return runs.write_data(tmp_path_factory.mktemp("data"))


def config(data, **changes):
    made = runs.recipe(data)
    made.steps, made.checkpoint.every, made.data.eval = 6, 2, str(data)
    made.update(changes)
    return made


def read(url, tmp_path, name):
    """Bytes of a file of a run's folder in the bucket."""
    path = tmp_path / name
    path.write_bytes(RemoteFolder(url).read(name))
    return path


@both
def test_a_stopped_run_in_an_object_store_goes_on_to_the_same_bits(store, data, tmp_path):
    one = jax.devices()[:1]
    plain = tmp_path / "plain"
    jaxvlm.Trainer(config(data), plain, devices=one).fit()
    url = f"{store.scheme}://runs/team/first"
    with pytest.raises(ZeroDivisionError):
        jaxvlm.Trainer(config(data), url, devices=one, callbacks=[Stop()]).fit()
    held = set(RemoteFolder(url).files(without=["checkpoints"]))
    assert {"config.json", "metrics.jsonl", "tokenizer/tokenizer.json", ".locks/000001"} <= held
    result = jaxvlm.Trainer(config(data), url, devices=one).fit()
    assert result["step"] == 6
    read(url, tmp_path, "metrics.jsonl")
    assert runs.losses(tmp_path) == runs.losses(plain)
    mine, theirs = jaxvlm.load(url, "latest"), jaxvlm.load(plain, "latest")
    for name, x in theirs.params.items():
        np.testing.assert_array_equal(mine.params[name], x, err_msg=name)
    # Another run begins with its weights.
    begun = config(data, init_from=url)
    trainer = jaxvlm.Trainer(begun, tmp_path / "next", devices=one)
    assert trainer.fit()["step"] == 6
    assert RemoteFolder(url).names(".locks") == ["000002"]


def test_the_command_line_reads_a_run_in_an_object_store(store, data, capsys):
    def run(*args):
        code = cli(list(args))
        return code, "".join(capsys.readouterr())

    url = "gs://runs/team/second"
    recipe = f"--config={runs.HERE / 'recipe.py'}:{data}"
    code, said = run("train", recipe, f"--workdir={url}", "--config.steps=3")
    assert code == 0 and "jaxvlm-run-" not in said, said
    run_folder._read.clear()
    code, said = run("export", f"--workdir={url}", f"--output={url}")
    assert code == 2 and f"--output={url} is not empty; give a new folder" in said
    code, said = run("eval", f"--checkpoint={url}", f"--data={data}", "--limit=4")
    assert code == 0 and "exact_match" in said, said
    code, said = run("eval", "--checkpoint=gs://runs/none", f"--data={data}")
    assert code == 2 and "gs://runs/none holds no run" in said
    code, said = run("train", recipe, "--workdir=az://runs/x")
    assert code == 2 and "gs://BUCKET/FOLDER" in said


@both
@pytest.mark.long
def test_two_processes_share_a_folder_in_an_object_store(store, data, tmp_path):
    """Killed and resumed, with the visual-token cache of a trained encoder in host memory."""
    url = f"{store.scheme}://runs/team/both"
    args = (
        *("--config.mesh.data=4", "--config.mesh.fsdp=2", "--config.cache.policy=lazy"),
        *("--config.cache.memory_mb=16", "--config.cache.max_images=16"),
        *("--config.data.flip=False", "--config.data.max_shift=0"),
    )
    plain = tmp_path / "plain"
    runs.finish(runs.start(plain, data, *args))
    first = together(url, data, *args, "--config.steps=100000", env=(store.env, store.env))
    deadline = time.monotonic() + 180
    while not RemoteFolder(f"{url}/checkpoints").exists("6/commit_success.txt"):
        assert all(process.poll() is None for process in first), [p.communicate() for p in first]
        assert time.monotonic() < deadline
        time.sleep(0.2)
    for process in first:
        process.kill()
        process.communicate()
    again = together(url, data, *args, env=(store.env, store.env))
    try:
        outputs = [runs.finish(process) for process in again]
    finally:
        for process in again:
            process.kill()
    assert "resuming at step" in outputs[0]
    read(url, tmp_path, "metrics.jsonl")
    expected, got = runs.losses(plain), runs.losses(tmp_path)
    assert got.keys() == expected.keys()
    for step, loss in expected.items():
        close(got[step], loss, 1e-6, step)
