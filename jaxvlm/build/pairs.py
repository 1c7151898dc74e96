"""How a model of vectors is run on pairs."""

from __future__ import annotations

from collections.abc import Collection

from jaxvlm.build.model import Model
from jaxvlm.config import DualConfig
from jaxvlm.parallel.mesh import batch_shards
from jaxvlm.parallel.sharding import constrain
from jaxvlm.train.pairs import Chunk, Paired, Side
from jaxvlm.train.runner import PlainRunner
from jaxvlm.types import Batch, Params

Chunks = tuple[Chunk, Chunk]
"""Of queries and of documents."""
_TOWERS = ("vision", "text")


def pair_runner(
    model: Model, trained: Collection[str], chunks: Chunks, axes: tuple[str, ...] = ()
) -> Paired:
    """What takes the gradient of a loss over vectors.

    Args:
        model: of vectors.
        trained: paths of its trainable parameters.
        chunks: rows that are run at once.
        axes: see :class:`Paired`.
    """
    dual = isinstance(model.config, DualConfig)

    def any_of(*parts: str) -> bool:
        return any(path.startswith(parts) for path in trained)

    def learns(batch: Batch) -> bool:
        pictures = any(x is not None for x in (batch.pixels, batch.patches, batch.features))
        if not dual:
            return any_of("decoder/", "head/project", *["vision/", "top/", "connector/"] * pictures)
        seen = {"vision": pictures, "text": batch.tokens.shape[1] > 0}
        return any(any_of(f"{t}/", f"head/{t}") for t in _TOWERS if seen[t])

    def behind(params: Params, batch: Batch) -> Batch:
        return model.module(params).towers(batch, still)

    has = model.config.towers if dual else ("vision",)
    still = [tower for tower in has if not any_of(f"{tower}/")]
    query, document = (Side(chunk, behind if still else None, learns) for chunk in chunks)
    place = constrain(model.layout("gradients"))
    return Paired(
        PlainRunner(lambda params, batch: model.module(params).embed(batch)),
        query,
        document,
        model.mesh,
        batch_shards(model.mesh),
        axes,
        (lambda grads: grads) if axes else place,
    )
