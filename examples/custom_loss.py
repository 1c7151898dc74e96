"""A loss of one's own: the focal loss on answer tokens, and the recipe that trains with it.

    jaxvlm train --config=examples/custom_loss.py:DATA.jsonl --workdir=runs/focal \\
        --config.loss.options.gamma=1.0

Focal loss (arXiv 1708.02002) counts tokens that the model is already sure of less. docs/extend.md
explains each part.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxvlm.config import default_config
from jaxvlm.losses.next_token import targets, token_scores
from jaxvlm.types import Sums


@dataclasses.dataclass(frozen=True)
class Focal:
    """``(1 - p)^gamma * -log p`` of each answer token, p being its probability."""

    gamma: float = 2.0  # a setting: config.loss.options.gamma
    loss_chunk: int = 0  # takes the value of config.loss_chunk, because `reads` names it

    reads = ("loss_chunk",)  # every other setting of losses is refused
    additive = True  # a sum over tokens, so that gradients may be accumulated over microbatches

    def coefficients(self):
        """The factor of each term."""
        return {"loss": 1.0}

    def weights(self, batch):
        """What each term is divided by: the number of answer tokens in the global batch."""
        return {"loss": jnp.sum(targets(batch)[1])}

    def __call__(self, out, batch):
        """Sums over the answer tokens: the loss, and the accuracy as a metric."""
        labels, weight = targets(batch)
        nll, correct = token_scores(out, labels, self.loss_chunk)
        unsure = jax.lax.stop_gradient(-jnp.expm1(-nll)) ** self.gamma
        accuracy = (jnp.sum(correct * weight), jnp.sum(weight))
        return Sums({"loss": jnp.sum(unsure * nll * weight)}, {"accuracy": accuracy})


def get_config(data: str):
    """A tiny model on the conversations in the file ``data``."""
    config = default_config()
    config.loss.target = f"{__file__}:Focal"
    config.loss.options.gamma = 2.0
    config.data.train = config.data.eval = data
    config.data.batch_size, config.data.max_length = 8, 64
    config.model.vision.image_size, config.model.vision.patch_size = 16, 8
    config.steps, config.log_every, config.checkpoint.every = 12, 1, 4
    return config
