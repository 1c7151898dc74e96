"""docs/extend.md: its Python is run as it stands."""

from __future__ import annotations

import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import ROWS, VOCAB, random_batch
from runs import losses, recipe, write_data

import jaxvlm
from jaxvlm.build.losses import LOSSES
from jaxvlm.config import MeshConfig
from jaxvlm.data import formats
from jaxvlm.losses.next_token import targets
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.sharding import to_global
from jaxvlm.types import Loss, Out

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "extend.md"


@pytest.fixture(autouse=True)
def names_are_forgotten(monkeypatch):
    """What a block adds to a dict is gone after its test."""
    monkeypatch.setattr("jaxvlm.build.losses.LOSSES", LOSSES.copy())
    monkeypatch.setattr("jaxvlm.data.formats.FORMATS", formats.FORMATS.copy())


def run_section(title: str) -> dict:
    """The names that a section's Python blocks define."""
    section = PAGE.read_text(encoding="utf-8").split(f"\n## {title}\n")[1].split("\n## ")[0]
    blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert blocks, title
    names = {"__name__": "extend"}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec", dont_inherit=True), names)
    return names


def test_the_loss_trains(tmp_path):
    run_section("A loss")
    data = write_data(tmp_path, pictures=8)
    config = recipe(data)
    config.loss, config.steps, config.optim.warmup_steps = "focal", 2, 0
    jaxvlm.Run(config, tmp_path / "run", jax.devices()[:1]).fit()
    assert 0 < losses(tmp_path / "run")[2] < losses(tmp_path / "run")[1]


def test_the_loss_is_what_it_says():
    focal = run_section("A loss")["Focal"]()
    assert isinstance(focal, Loss)
    batch = jax.tree.map(jnp.asarray, random_batch())
    hidden = jnp.ones((*batch.tokens.shape, 1))
    head = jnp.log(jnp.arange(1.0, VOCAB + 1))[None]  # token t has t + 1 parts of the probability
    rows, places = np.nonzero(np.asarray(targets(batch)[1]))
    likely = (np.asarray(targets(batch)[0])[rows, places] + 1) / (VOCAB * (VOCAB + 1) / 2)
    expected = np.sum((1 - likely) ** 2 * -np.log(likely))
    parts = [jax.tree.map(lambda x, i=i: x[i::2], (hidden, batch)) for i in range(2)]
    sums = [focal(Out(h, head), b).terms["focal"] for h, b in [(hidden, batch), *parts]]
    np.testing.assert_allclose(sums[0], expected, rtol=1e-5)
    np.testing.assert_allclose(sums[0], sums[1] + sums[2], rtol=1e-6)
    assert focal.weights(batch)["focal"] == len(rows)


def test_the_data_format_is_read(tmp_path):
    run_section("A data format")
    path = tmp_path / "data.jsonl"
    good = {"question": "what is it?", "answer": "a cat", "image": "cat.png"}
    path.write_text(f"{json.dumps(good)}\n{json.dumps(good | {'answer': 3})}\n")
    (record,), (problem,) = formats.read(str(path))
    assert record.turns[0] == formats.Turn("user", "<image>what is it?")
    assert record.turns[1] == formats.Turn("assistant", "a cat")
    assert record.images == (str(tmp_path / "cat.png"),)
    assert str(problem) == "data.jsonl:2: 'answer' is not text (3)"


def test_the_shell_line_runs(capsys):
    (line,) = re.findall(r'```sh\npython -c "\n(.*?)"\n```', PAGE.read_text(), re.DOTALL)
    exec(line, {})
    assert "decoder/embed/table (512, 64) vocab embed" in capsys.readouterr().out


@pytest.mark.parametrize("frozen", [pytest.param((), marks=pytest.mark.long), ("teacher/*",)])
def test_two_towers_train_as_on_one_device(frozen):
    build = run_section("Towers with strategies of their own")["build"]
    batch = random_batch()._replace(pixels=random_batch().pixels[:, :1])

    def train(config, devices):
        mesh = make_mesh(config, devices)
        model, step, _, init = build(mesh, frozen)
        state = init(model.init(0))
        for _ in range(3):
            state, metrics = step(state, to_global(mesh, batch, ROWS))
        return model, float(metrics["loss"]), state

    model, loss, state = train(MeshConfig(data=2, fsdp=4), jax.devices())
    _, expected, one = train(MeshConfig(data=1), jax.devices()[:1])
    assert abs(loss - expected) <= 1e-5 * abs(expected)
    for path, x in one.params.items():
        if path.endswith("/bk"):
            continue  # its gradient is rounding alone, which Adam makes a step of
        np.testing.assert_allclose(state.params[path], x, rtol=1e-4, atol=2e-6, err_msg=path)
    path = "stack/blocks/mlp/w_in"
    assert model.shardings[f"student/{path}"].is_fully_replicated
    assert "fsdp" in str(model.shardings[f"teacher/{path}"].spec)
    assert (f"teacher/{path}" in state.frozen) == bool(frozen)
