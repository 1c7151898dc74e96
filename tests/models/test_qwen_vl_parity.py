"""transformers' torch models are the oracle for whole Qwen-VLs of every generation.

Logits, loss, gradients, positions, greedy ids, tensors both ways, and what is refused.
"""

from __future__ import annotations

import functools
import os

import jax
import numpy as np
import pytest
from builders import loss_and_gradient, worst_gradient
from greedy import assert_same_choices, assert_same_words, forced, our_greedy, torch_greedy
from numerics import close_in_norm

from jaxvlm.hf.families import qwen_vl

torch = pytest.importorskip("torch", reason="the oracle; Python 3.11 only")
transformers = pytest.importorskip("transformers", reason="the oracle")

from qwen import (  # noqa: E402  # after the oracle is known to be there
    CASES,
    KINDS,
    PLAIN,
    ROWS,
    drawn,
    hf_config,
    make_batch,
    named,
    oracle,
    torch_inputs,
)
from safetensors.numpy import load_file, save_file  # noqa: E402

DRAWS = int(os.environ.get("JAXVLM_DRAWS", "1"))


@functools.cache
def loss_and_grad(name):
    return loss_and_gradient(oracle(name)[1])


CHOSEN = [
    (name, rows) for name in CASES for rows in ROWS if name in PLAIN or rows == "padding left"
]


@pytest.mark.parametrize(("name", "rows"), CHOSEN)
def test_logits_loss_and_gradients_are_torchs(name, rows, shows):
    shows(hf_config(name).model_type, "import", "train", "several images")
    assert_torch_agrees(name, rows)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(DRAWS))
def test_settings_drawn_at_random_are_torchs(kind, seed, parity):
    """``JAXVLM_DRAWS=10`` draws ten a family."""
    name = f"{kind}, drawn {seed}"
    CASES[name] = (kind, drawn(kind, seed))
    parity(kind, seed, *assert_torch_agrees(name, ("padding right", "padding left")[seed % 2]))
    oracle.cache_clear()
    loss_and_grad.cache_clear()


def assert_torch_agrees(name, rows):
    theirs, ours, params = oracle(name)
    batch = make_batch(ours, hf_config(name).to_dict(), *ROWS[rows])
    given = torch_inputs(batch, ours.config.vision)
    labels = torch.from_numpy(np.where(batch.loss_weight > 0, batch.tokens, -100)).long()
    theirs.model.rope_deltas = None
    logits = theirs(**given).logits
    theirs.zero_grad()
    flat = logits[:, :-1].flatten(0, 1)
    their_loss = torch.nn.functional.cross_entropy(flat, labels[:, 1:].flatten())
    their_loss.backward()
    their_grads = qwen_vl.weights(ours.config).load(named(theirs, lambda p: p.grad))

    (value, our_logits), grads = loss_and_grad(name)(params, batch)
    real = batch.segment > 0
    expected, got = logits.detach().numpy()[real], np.asarray(our_logits)[real]
    error = close_in_norm(got, expected, 1e-4)
    np.testing.assert_allclose(float(value), their_loss.item(), rtol=1e-5)
    worst = worst_gradient(grads, their_grads)
    seen = any(np.any(their_grads[p]) for p in ("vision/stem/w", "connector/w_out"))
    assert seen == (rows != "text alone")
    return float(error), float(np.abs(got - expected).max()), worst


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("rows", ["padding right", "padding left"])
def test_positions_are_torchs(name, rows, shows):
    shows(hf_config(name).model_type, "any resolution")
    theirs, ours, _ = oracle(name)
    batch = make_batch(ours, hf_config(name).to_dict(), *ROWS[rows])
    given = torch_inputs(batch, ours.config.vision)
    del given["pixel_values"]
    expected, _ = theirs.model.get_rope_index(**given)
    np.testing.assert_array_equal(batch.positions, expected.numpy().transpose(1, 0, 2))


@pytest.mark.parametrize("name", PLAIN)
def test_greedy_generation_gives_transformers_ids(name, shows):
    shows(hf_config(name).model_type, "generate")
    theirs, ours, params = oracle(name)
    # No row ends in an image: there torch counts on from its last token, row by row.
    rows = [[(24, 16), 6], [2, (8, 30), 3, (16, 16), 1], [5]]
    batch = make_batch(ours, hf_config(name).to_dict(), rows, "left", seed=2)
    made = torch_greedy(theirs, torch_inputs(batch, ours.config.vision))
    found = our_greedy(ours.module, params, batch, ours.config.decoder)
    assert_same_choices(found, made, sure_of=0.25, words=8)
    # After the first ambiguous token: what our model says of torch's own tokens.
    out = jax.jit(ours.apply)(params, forced(batch, made))
    assert_same_words(out.logits(out.hidden), made)


@pytest.mark.parametrize("name", CASES)
def test_tensors_come_and_go_unchanged(name, tmp_path, shows):
    """What transformers writes is what we write, and what we write it loads."""
    shows(hf_config(name).model_type, "export")
    theirs, ours, params = oracle(name)
    theirs.save_pretrained(tmp_path / "theirs")
    published = load_file(tmp_path / "theirs" / "model.safetensors")
    weights = qwen_vl.weights(ours.config)
    written = weights.dump(params)
    assert written.keys() == published.keys()
    for tensor, x in written.items():  # transformers writes experts turned round, and reads both
        turned = x.swapaxes(1, 2) if ".experts." in tensor else x
        np.testing.assert_array_equal(turned, published[tensor])
    for path, x in weights.load(written).items():
        np.testing.assert_array_equal(x, params[path])
    (tmp_path / "ours").mkdir()
    theirs.config.save_pretrained(tmp_path / "ours")
    save_file(written, tmp_path / "ours" / "model.safetensors", {"format": "pt"})
    loaded, info = type(theirs).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    for key, x in theirs.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], x), key
