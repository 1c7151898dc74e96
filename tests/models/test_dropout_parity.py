"""Our dropout masks in transformers' BERT and in PEFT: the same outputs and gradients."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import worst_gradient
from numerics import close_in_norm, relative

from jaxvlm.config import MeshConfig
from jaxvlm.hf.families import bert
from jaxvlm.models.lora import Adapted
from jaxvlm.nn.dropout import dropout, fold
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.spmd.model import build_model
from jaxvlm.train.dropout_keys import seeded
from jaxvlm.types import Batch

torch = pytest.importorskip("torch", reason="the oracle; Python 3.11 only")
transformers = pytest.importorskip("transformers", reason="the oracle")
peft = pytest.importorskip("peft", reason="the oracle")

from towers import shaken  # noqa: E402  # it imports the oracle

B, T, D, HEADS, LAYERS = 3, 7, 24, 3, 2
HIDDEN, SHARES = 0.2, 0.4


def drawn(shape, rate, noise):
    """A mask as our code draws it: 1 / (1 - rate), or 0."""
    return torch.from_numpy(np.array(dropout(jnp.ones(shape), rate, noise)))


def masks_of(noise):
    """All masks of a pass through the encoder, in the order in which BERT asks for them."""
    tower = fold(noise, "text")
    yield HIDDEN, drawn((B, T, D), HIDDEN, fold(tower, "embeddings"))
    for layer in range(LAYERS):
        here = fold(tower, layer)
        shares = drawn((B, HEADS, T, 1, T), SHARES, fold(here, "shares"))
        yield SHARES, shares[:, :, :, 0]
        for half in ("attn", "mlp"):
            yield HIDDEN, drawn((B, T, D), HIDDEN, fold(here, half))


@pytest.mark.long
def test_bert_in_training_is_torchs(monkeypatch):
    theirs = shaken(
        transformers.BertModel(
            transformers.BertConfig(
                vocab_size=40, hidden_size=D, intermediate_size=36, num_hidden_layers=LAYERS,
                num_attention_heads=HEADS, max_position_embeddings=T, type_vocab_size=1,
                hidden_dropout_prob=HIDDEN, attention_probs_dropout_prob=SHARES,
                attn_implementation="eager",
            )
        )
    )  # fmt: skip
    config = bert.config_from_hf(theirs.config.to_dict())
    assert config.text.dropout == config.text.attention_dropout == 0  # theirs says no word here
    text = dataclasses.replace(config.text, dropout=HIDDEN, attention_dropout=SHARES)
    config = dataclasses.replace(config, text=text)
    model = build_model(config, make_mesh(MeshConfig(1), jax.devices()[:1]))
    names = bert.weights(config)
    named = dict(theirs.named_parameters())
    params = names.load({n: p.detach().numpy() for n, p in named.items()})

    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 40, (B, T)).astype(np.int32)  # torch learns nothing of padding, 0
    positions = np.broadcast_to(np.arange(T, dtype=np.int32), (B, 1, T))
    batch = Batch(tokens, None, positions, np.ones_like(tokens))
    batch = seeded(3)(jnp.int32(7), batch)
    weight = rng.normal(size=(B, T, D)).astype(np.float32)

    asked = masks_of(batch.dropout_keys)

    def masked(x, p=0.5, training=True, inplace=False):
        rate, mask = next(asked)
        assert training and p == rate and x.shape == mask.shape
        return x * mask

    monkeypatch.setattr(torch.nn.functional, "dropout", masked)
    expected = theirs.train()(input_ids=torch.from_numpy(tokens).long()).last_hidden_state
    assert next(asked, None) is None  # each mask was asked for
    (expected * torch.from_numpy(weight)).sum().backward()

    @jax.jit
    def run(params, batch):
        def objective(params):
            encoder = model.module(params, batch.dropout_keys).text
            given = (batch.tokens, batch.segment, batch.positions[:, 0])
            x = encoder(*given, dropout_keys=batch.dropout_keys)
            return jnp.sum(x * weight), x

        return jax.value_and_grad(objective, has_aux=True)(params)

    (_, x), grads = run(params, batch)
    close_in_norm(x, expected, 1e-5)
    none = torch.zeros(())  # of the pooler, which has no say
    theirs_grads = {n: none.expand(p.shape) if p.grad is None else p.grad for n, p in named.items()}
    worst_gradient(grads, names.load({n: g.numpy() for n, g in theirs_grads.items()}))
    (_, still), _ = run(params, batch._replace(dropout_keys=None))
    assert relative(still, expected) > 0.1


class Masked(torch.nn.Module):
    """Replaces PEFT's dropout."""

    def __init__(self, mask):
        super().__init__()
        self.mask = mask

    def forward(self, x):
        return x * self.mask


@pytest.mark.parametrize("dora", [False, True])
def test_an_adapters_dropout_is_pefts(dora):
    torch.manual_seed(0)
    settings = peft.LoraConfig(
        r=2, lora_alpha=6, lora_dropout=0.3, target_modules=["map"], use_dora=dora
    )
    net = torch.nn.Module()
    net.map = torch.nn.Linear(D, 10, bias=False)
    theirs = peft.inject_adapter_in_model(settings, net).train().map
    with torch.no_grad():
        for name, x in theirs.named_parameters():
            if "lora" in name:
                x += 0.3 * torch.rand_like(x)
    noise = fold(
        seeded(0)(jnp.int32(0), Batch(np.zeros((B, T)), None, None, None)).dropout_keys, "map"
    )
    theirs.lora_dropout["default"] = Masked(drawn((B, T, D), 0.3, noise))
    x = torch.randn(B, T, D)
    weight = torch.randn(B, T, 10)
    y = theirs(x)
    (y * weight).sum().backward()

    parts = {"a": theirs.lora_A["default"].weight, "b": theirs.lora_B["default"].weight}
    if dora:
        parts["magnitude"] = theirs.lora_magnitude_vector["default"].weight
    ours = {n: p.detach().numpy().T for n, p in parts.items()}
    w = jnp.asarray(theirs.base_layer.weight.detach().numpy().T)

    def objective(ours):
        adapted = Adapted(w, ours["a"], ours["b"], ours.get("magnitude"), noise, 3.0, 0.3)
        y = adapted.contract(jnp.asarray(x.numpy()), 1, False)
        return jnp.sum(y * weight.numpy()), y

    (_, found), grads = jax.value_and_grad(objective, has_aux=True)(ours)
    close_in_norm(found, y, 1e-6)
    for name, grad in grads.items():
        close_in_norm(grad, torch.from_numpy(parts[name].grad.numpy().T), 1e-5, name)
