"""What greedy decoding of a torch model gives, and what ours has to give."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numerics import close_in_norm

from jaxvlm.inference.generate import Sampling, generate

NEW = 32


class Greedy(NamedTuple):
    """A torch model's choices."""

    ids: np.ndarray
    """i64[B, NEW]."""
    logits: np.ndarray
    """f32[B, NEW, V]."""

    @property
    def clear(self):
        """bool[B, NEW]: the two best logits are 1e-3 of the range apart, or more."""
        two = np.sort(np.partition(self.logits, -2, axis=-1)[..., -2:], axis=-1)
        return two[..., 1] - two[..., 0] > 1e-3 * np.ptp(self.logits, axis=-1)


def torch_greedy(model, inputs):
    """The choices of ``model.generate``; it counts positions itself."""
    import torch  # the oracle; not everywhere

    made = model.generate(
        **{name: x for name, x in inputs.items() if name != "position_ids"},
        max_new_tokens=NEW,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    ids = made.sequences[:, inputs["input_ids"].shape[1] :]
    return Greedy(ids.numpy(), torch.stack(made.logits, 1).numpy())


def our_greedy(module, params, batch, decoder):
    """i64[B, NEW] of our generation.

    Args:
        module: parameters -> what decodes.
        params: of it.
        batch: prompts, padded on the left.
        decoder: DecoderConfig.
    """
    shape = (decoder.depth, decoder.num_kv_heads, decoder.head_dim)
    run = jax.jit(lambda p, b: generate(module(p), b, Sampling(), NEW, shape, jax.random.key(0)))
    return np.asarray(run(params, jax.tree.map(jnp.asarray, batch)))


def assert_same_choices(ours, theirs, varied=True, sure_of=0.5, over=NEW, words=4):
    """The same ids up to a row's first choice that is not clear.

    Args:
        ours: i64[B, NEW].
        theirs: Greedy.
        varied: the model is known to say more than one word again and again.
        sure_of: the share of choices that has to be compared,
        over: of so many in each row.
        words: how many different ones there have to be more of.
    """
    sure = np.cumprod(theirs.clear, axis=1).astype(bool)
    assert sure[:, :over].mean() > sure_of and theirs.clear.mean() > 0.9
    assert len(np.unique(theirs.ids)) > words or not varied, "one token over and over"
    np.testing.assert_array_equal(np.where(sure, ours, 0), np.where(sure, theirs.ids, 0))


def forced(batch, theirs):
    """``batch``, padded on the left, followed by torch's own words."""
    rows, extra = batch.positions.shape[1], ((0, 0), (0, NEW))
    last = batch.positions.max((1, 2), keepdims=True)
    on = np.tile(last + 1 + np.arange(NEW, dtype=np.int32), (1, rows, 1))

    def longer(x, value):
        if x is None:
            return None
        return np.pad(x, extra + ((0, 0),) * (x.ndim - 2), constant_values=value)

    return batch._replace(
        tokens=np.concatenate([batch.tokens, theirs.ids.astype(np.int32)], 1),
        loss_weight=None,
        positions=np.concatenate([batch.positions, on], 2),
        segment=longer(batch.segment, 1),
        bidirectional=longer(batch.bidirectional, 0),
        image_source=longer(batch.image_source, -1),
        image_weight=longer(batch.image_weight, 0),
    )


def assert_same_words(logits, theirs):
    """Logits of :func:`forced`, those that choose the new tokens: torch's, and its choices."""
    said = np.asarray(logits)[:, -NEW - 1 : -1]
    close_in_norm(said, theirs.logits, 1e-4)
    np.testing.assert_array_equal(said.argmax(-1)[theirs.clear], theirs.ids[theirs.clear])
