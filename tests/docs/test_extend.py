"""docs/extend.md: its Python is run as it stands."""

from __future__ import annotations

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import ROWS, VOCAB, random_batch
from numerics import close

from jaxvlm.cache.policy import Policy
from jaxvlm.config import Config, LossConfig, MeshConfig
from jaxvlm.losses.next_token import targets, token_scores
from jaxvlm.losses.registry import make_loss
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.sharding import to_global
from jaxvlm.types import Loss, Out

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE, EXAMPLES = ROOT / "docs" / "extend.md", ROOT / "examples"


def section_blocks(title: str) -> list[str]:
    """The Python blocks of a section."""
    section = PAGE.read_text(encoding="utf-8").split(f"\n## {title}\n")[1].split("\n## ")[0]
    blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert blocks, title
    return blocks


def run_section(title: str) -> dict:
    """The names that a section's Python blocks define."""
    names = {"__name__": "extend"}
    for block in section_blocks(title):
        exec(compile(block, str(PAGE), "exec", dont_inherit=True), names)
    return names


@pytest.mark.parametrize(
    ("title", "file"), [("A loss", "custom_loss.py"), ("A data format", "custom_data.py")]
)
def test_the_page_shows_the_examples(title, file):
    """tests/e2e/test_extensions.py trains with them."""
    assert section_blocks(title)[0].strip() in (EXAMPLES / file).read_text()
    assert run_section(title)  # with the imports that it shows


def test_targets_scores_and_logits_are_what_the_page_says():
    entropy = run_section("A loss")["entropy"]
    batch = jax.tree.map(jnp.asarray, random_batch())
    hidden = jax.random.normal(jax.random.key(0), (*batch.tokens.shape, 4))
    head = jax.random.normal(jax.random.key(1), (4, VOCAB))
    labels, weight = targets(batch)
    rows, places = np.nonzero(np.asarray(weight))
    np.testing.assert_array_equal(labels[rows, places], batch.tokens[rows, places + 1])
    np.testing.assert_array_equal(batch.segment[rows, places], batch.segment[rows, places + 1])
    for cap in (None, 5.0):
        x = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64)
        x = x if cap is None else cap * np.tanh(x / cap)
        log_p = x - np.log(np.sum(np.exp(x), axis=-1, keepdims=True))
        out = Out(hidden, head, logit_cap=cap)
        nll, correct = token_scores(out, labels)
        expected = -np.take_along_axis(log_p, np.asarray(labels)[..., None], axis=-1)[..., 0]
        np.testing.assert_allclose(nll, expected, rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(correct, np.argmax(x, axis=-1) == np.asarray(labels))
        expected = np.sum(-np.sum(np.exp(log_p) * log_p, axis=-1) * np.asarray(weight))
        np.testing.assert_allclose(entropy(out, batch), expected, rtol=1e-4)


def test_the_loss_is_what_it_says():
    group = LossConfig(target=str(EXAMPLES / "custom_loss.py:Focal"), options={"gamma": 3})
    focal = make_loss(Config(loss=group, loss_chunk=5))
    assert isinstance(focal, Loss) and (focal.loss.gamma, focal.loss.loss_chunk) == (3.0, 5)
    batch = jax.tree.map(jnp.asarray, random_batch())
    hidden = jnp.ones((*batch.tokens.shape, 1))
    head = jnp.log(jnp.arange(1.0, VOCAB + 1))[None]  # token t has t + 1 parts of the probability
    rows, places = np.nonzero(np.asarray(targets(batch)[1]))
    likely = (np.asarray(targets(batch)[0])[rows, places] + 1) / (VOCAB * (VOCAB + 1) / 2)
    expected = np.sum((1 - likely) ** 3 * -np.log(likely))
    parts = [jax.tree.map(lambda x, i=i: x[i::2], (hidden, batch)) for i in range(2)]
    sums = [focal(Out(h, head), b).terms["loss"] for h, b in [(hidden, batch), *parts]]
    np.testing.assert_allclose(sums[0], expected, rtol=1e-5)
    np.testing.assert_allclose(sums[0], sums[1] + sums[2], rtol=1e-6)
    assert focal.weights(batch)["loss"] == len(rows)


def test_the_policy_is_one():
    policy = run_section("A cache policy")["EveryFew"](every=2, seed=7)
    assert isinstance(policy, Policy) and policy.refresh_fraction > 0
    allowed = jnp.asarray([True, False, True])
    for step, drawn in ((4, [True, False, True]), (5, [False] * 3)):
        made, chance = policy.draw(allowed, None, step)
        assert made.tolist() == drawn and chance.tolist() == [0.5, 0.0, 0.5]


def test_the_shell_line_runs(capsys):
    (line,) = re.findall(r'```sh\npython -c "\n(.*?)"\n```', PAGE.read_text(), re.DOTALL)
    exec(line, {})
    assert "decoder/embed/table (512, 64) vocab embed" in capsys.readouterr().out


@pytest.mark.parametrize("frozen", [pytest.param((), marks=pytest.mark.long), ("teacher/*",)])
def test_two_towers_train_as_on_one_device(frozen):
    build = run_section("Submodels with strategies of their own")["build"]
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
    close(loss, expected, 1e-5)
    for path, x in one.params.items():
        if path.endswith("/bk"):
            continue  # its gradient is rounding alone, which Adam makes a step of
        np.testing.assert_allclose(state.params[path], x, rtol=1e-4, atol=2e-6, err_msg=path)
    path = "stack/blocks/mlp/w_in"
    assert model.shardings[f"student/{path}"].is_fully_replicated
    assert "fsdp" in str(model.shardings[f"teacher/{path}"].spec)
    assert (f"teacher/{path}" in state.frozen) == bool(frozen)
