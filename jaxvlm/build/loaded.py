"""A trained model, ready to answer and to be evaluated."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from PIL import Image

from jaxvlm.build import inputs, pretrained, prompts, record, sheets
from jaxvlm.build.model import Model, build_model
from jaxvlm.build.prompts import Picture
from jaxvlm.build.scorer import Report, Scorer
from jaxvlm.build.setup import keep_freed_memory, use_compile_cache
from jaxvlm.config import ConfigError, MeshConfig, ModelConfig, TrainConfig
from jaxvlm.data import images
from jaxvlm.data.tokenizer import ChatTokenizer
from jaxvlm.infer.generate import Sampling, generate
from jaxvlm.io.checkpoint import restore_params
from jaxvlm.parallel.mesh import batch_shards, make_mesh
from jaxvlm.parallel.sharding import replicated
from jaxvlm.types import Batch, Params

_ONE = (str, os.PathLike, Image.Image, np.ndarray)


class Loaded:
    """A model with its parameters and tokenizer.

    Args:
        config: of the run that trained it, the vocabulary's size filled in.
        model: on its mesh.
        params: all parameters.
        tokenizer: with its chat template.
        pictures: what the model wants of them.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: Model,
        params: Params,
        tokenizer: ChatTokenizer,
        pictures: images.PictureFormat,
    ):
        self.config, self.model, self.params = config, model, params
        self.tokenizer, self.pictures = tokenizer, pictures
        # Whole on every device: each process reads all answers.
        self._generate = jax.jit(
            self._run, static_argnums=(2,), out_shardings=replicated(model.mesh)
        )

    def generate(
        self,
        pictures: Picture | Sequence[Picture],
        prompt: str,
        max_new: int = 64,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> str:
        """The model's answer.

        Args:
            pictures: one, several, or none (``[]``).
            prompt: what to ask; ``<image>`` marks where each picture goes. Without a mark the
                pictures come first.
            max_new: new tokens at most.
            temperature: 0 is greedy.
            seed: for temperatures above 0.

        Raises:
            ConfigError: marks and pictures differ in number.
            DataError: a picture can't be read.
        """
        given: list[Any] = [pictures] if isinstance(pictures, _ONE) else list(pictures)
        return self.generate_batch([(given, prompt)], max_new, temperature, seed)[0]

    def generate_batch(
        self,
        queries: Sequence[tuple[Sequence[Picture], str]],
        max_new: int = 64,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> list[str]:
        """Answers to several (pictures, prompt) pairs at once; see :meth:`generate`."""
        if max_new < 1 or temperature < 0:
            raise ConfigError(
                f"max_new={max_new} must be at least 1, and temperature={temperature:g} at least 0"
            )
        sampling = Sampling(max_new, temperature, self.tokenizer.stop_ids)
        batch = prompts.batch(
            queries, self.model, self.tokenizer, self.pictures, self.config.data.max_pixels
        )
        new = self._generate(self.params, batch, sampling, jax.random.key(seed))
        answers = []
        for row in np.asarray(new)[: len(queries)].tolist():
            stop = next((i for i, t in enumerate(row) if t in sampling.stop_ids), len(row))
            answers.append(self.tokenizer.decode(row[:stop]).strip())
        return answers

    def evaluate(
        self, spec: str = "", limit: int = 0, sheet: str = "", blind: bool = True
    ) -> Report:
        """Exact match on a data file, and the blind control.

        Args:
            spec: the file; the run's own ``data.eval`` if empty.
            limit: records at most; 0 is all.
            sheet: write a contact sheet to this PNG.
            blind: whether to run the control.

        Raises:
            ConfigError: no data is named.
        """
        spec = spec or self.config.data.eval
        if not spec:
            raise ConfigError("eval: the run has no config.data.eval; give --data=FILE")
        dataset = inputs.make_dataset(self.config, spec, self.tokenizer, self.pictures)
        parts = batch_shards(self.model.mesh)
        rows = -(-self.config.data.batch_size // parts) * parts
        report = Scorer(self.model, dataset, rows).report(self.params, limit, blind)
        if sheet:
            sheets.contact_sheet(self, dataset, pathlib.Path(sheet))
        return report

    def _run(self, params: Params, batch: Batch, sampling: Sampling, key: jax.Array) -> jax.Array:
        d = self.model.config.decoder
        shape = (d.depth, d.num_kv_heads, d.head_dim)
        return generate(self.model.module(params), batch, sampling, shape, key)


def load(folder: str | os.PathLike[str], which: str = "best", mesh: Any = None) -> Loaded:
    """A trained model, from a run's folder or a Hugging Face checkpoint.

    Args:
        folder: a workdir of ``jaxvlm train``, a folder with ``config.json`` and safetensors, or
            an id of the hub.
        which: of a workdir: ``best`` (by the run's metric; the latest where none was evaluated)
            or ``latest``.
        mesh: MeshConfig; all devices on ``data`` if ``None``.

    Raises:
        ConfigError: the folder holds neither.
        CheckpointError: no checkpoint can be read.
    """
    record.local_folder("checkpoint", folder)
    hugging_face = pretrained.is_checkpoint(folder)
    workdir = pathlib.Path(folder)
    if hugging_face:
        config = TrainConfig(model=ModelConfig(checkpoint=str(folder)))
        source = pretrained.find(str(folder))
        config = pretrained.with_source(config, source)
    else:
        config = record.read_config(workdir)
        source = pretrained.find(config.model.checkpoint, workdir)
    keep_freed_memory()
    use_compile_cache(config.compile_cache)
    saved = None if hugging_face else workdir / "tokenizer"
    tokenizer = inputs.make_tokenizer(config, saved, ([], []), source)
    pretrained.check_tokens(source, tokenizer)
    config = dataclasses.replace(
        config, model=inputs.with_vocab(config.model, tokenizer.vocab_size)
    )
    model = build_model(config.model, make_mesh(mesh or MeshConfig()))
    pictures = pretrained.pictures(config, source, tokenizer)
    if hugging_face and source is not None:
        params = pretrained.read_params(source, config.model, model.abstract())
    else:
        choice = (config.checkpoint.metric, config.checkpoint.mode)
        params = restore_params(workdir / "checkpoints", model.abstract(), which, *choice)
    return Loaded(config, model, params, tokenizer, pictures)
