"""What a training run is made of; the trainer's helpers take this, and none takes the trainer."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import numpy as np

from jaxvlm.cache.host_cache import HOST_CACHE
from jaxvlm.cache.run_inputs import CacheInputs
from jaxvlm.config import Config, ConfigError
from jaxvlm.data.page_allocation import NoPages, PageAllocation
from jaxvlm.hf import pretrained
from jaxvlm.inference import embedding_evaluator
from jaxvlm.inference.encoder import Encoder
from jaxvlm.inference.vlm import VLM
from jaxvlm.spmd.model import Model
from jaxvlm.train.progress import named
from jaxvlm.trainer.training import Training
from jaxvlm.types import TrainState


class Run:
    """The parts of a run. :class:`jaxvlm.trainer.trainer.Trainer` fills them in."""

    name: str
    """In front of its lines, where one process has several runs; "" otherwise."""
    began: float
    """When its process started, in seconds of ``time.time()``."""
    config: Config
    """The settings, with what the mesh, the checkpoint and the data decide filled in."""
    workdir: pathlib.Path | None
    """The run's folder; ``None`` for a run that is only tried out (``dry_run``)."""
    mesh: jax.sharding.Mesh
    rows: np.ndarray
    """i64[rows]: this process's rows of each global batch, ascending."""
    source: pretrained.Source | None
    """The Hugging Face checkpoint that the weights start from."""
    tokenizer: Any
    """A ChatTokenizer; a TextTokenizer or ``None`` for a dual encoder."""
    image_format: Any
    """An ImageFormat; a Processor or ``None`` for a dual encoder."""
    dataset: Any
    """A Dataset of conversations, or a PairDataset."""
    dual: Any
    """The sources of a dual encoder's towers; ``None`` for a vision-language model."""
    model: Model
    encoder: Model | None
    """The vision encoder on devices of its own (``config.encoder.devices``), or ``None``."""
    pages: PageAllocation | NoPages | None
    """Which cache pages each image has; ``None`` when visual tokens are not cached."""
    steps: int
    """Train steps of the whole run."""
    training: Training
    """The optimizer, the compiled step and the shardings of its state."""
    auto: list[str]
    """Names of the settings that the recipe left to the planner."""
    state: TrainState | None = None
    """The latest train state; ``None`` before training."""

    def log(self, line: str) -> None:
        """Print a line for people; process 0 alone does."""
        if not jax.process_index():
            print(named(self.name, line), flush=True)

    @property
    def meshes(self) -> list[jax.sharding.Mesh]:
        """The run's mesh, and the mesh of a vision encoder on devices of its own."""
        return [self.mesh, *([self.encoder.mesh] if self.encoder else [])]

    def has_cache(self, extra: dict[str, Any]) -> bool:
        """Whether visual tokens are cached, or were when the run was at the checkpoint it resumes.

        Args:
            extra: what was saved with that checkpoint.
        """
        kept = self.workdir is not None and (self.workdir / HOST_CACHE).is_dir()
        return self.pages is not None or HOST_CACHE in extra or kept

    @property
    def cache_inputs(self) -> CacheInputs:
        """What the visual-token caches outside of the devices use of the run."""
        return CacheInputs(
            self.config, self.model, self.dataset, self.rows, self.pages,
            self.training.learns, self.workdir,
        )  # fmt: skip

    def with_weights(self, state: TrainState) -> VLM | Encoder:
        """The weights of ``state`` as a model that answers, or that makes embeddings."""
        params = self.training.params(state)
        if self.dual is not None:
            parts = (self.source, self.model, params, self.tokenizer, self.image_format)
            return Encoder(*parts, self.config)
        return VLM(self.config, self.model, params, self.tokenizer, self.image_format)

    def generate(self, images: Any, prompt: str, **options: Any) -> str:
        """The current weights' answer; see :meth:`jaxvlm.inference.vlm.VLM.generate`."""
        model = self.loaded()
        if isinstance(model, Encoder):
            raise ConfigError("this model makes embeddings, and answers nothing")
        return model.generate(images, prompt, **options)

    def loaded(self) -> VLM | Encoder:
        """The current weights as a model that answers, or makes embeddings.

        Raises:
            ConfigError: nothing is trained yet.
        """
        if self.state is None:
            raise ConfigError("this run has no weights yet: call fit() first")
        return self.with_weights(self.state)

    def evaluate(self, blind: bool = True) -> dict[str, float]:
        """Evaluate the current weights on ``config.data.eval``.

        Args:
            blind: run the control too: another record's image, or documents at random.
        """
        return embedding_evaluator.evaluate(self.loaded(), blind=blind).metrics
