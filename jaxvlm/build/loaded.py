"""A trained model, ready to answer and to be evaluated."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from jaxvlm.build import adapters, dual, encoder, pretrained, prompts, record, sheets
from jaxvlm.build.losses import of_vectors
from jaxvlm.build.model import Model, build_model
from jaxvlm.build.process import keep_freed_memory, use_compile_cache
from jaxvlm.build.prompts import Picture
from jaxvlm.build.scorer import Report, Scorer
from jaxvlm.build.words import make_tokenizer, with_vocab
from jaxvlm.config import ConfigError, DataConfig, LoraConfig, MeshConfig, ModelConfig, TrainConfig
from jaxvlm.data import chat, images
from jaxvlm.data.run_data import make_dataset
from jaxvlm.data.tokenizer import ChatTokenizer
from jaxvlm.infer.embed import embed
from jaxvlm.infer.generate import Decoding, Sampling, decode, prefill
from jaxvlm.io.checkpoint import restore_params
from jaxvlm.models.embedder import TOKENS
from jaxvlm.models.families import ENCODERS, any_family, sentences
from jaxvlm.nn.norm import unit
from jaxvlm.parallel.mesh import batch_shards, make_mesh
from jaxvlm.parallel.sharding import replicated
from jaxvlm.types import Batch, Params

_ONE = (str, os.PathLike, Image.Image, np.ndarray)
_CAPACITY_STEP = 64
"""Room for new tokens is a multiple of it, so that few lengths are compiled."""
_CHUNK = 16
"""Tokens made between two looks at them; divides ``_CAPACITY_STEP``."""


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
        whole = replicated(model.mesh)
        self._prefill = jax.jit(self._start, static_argnums=(2, 3))
        self._decode = jax.jit(
            self._go_on,
            static_argnums=(2, 3),
            donate_argnums=1,
            out_shardings=(None, whole, whole),
        )
        self._embed = jax.jit(
            lambda params, batch, dims: self._vectors(model.module(params), batch, dims),
            static_argnums=2,
            out_shardings=whole,
        )

    def _vectors(self, module: Any, batch: Batch, dims: int) -> jax.Array:
        if of_vectors(self.config):
            return unit(module.embed(batch).hidden[:, : dims or None])
        return embed(module, batch, dims)

    @property
    def width(self) -> int:
        """Dims of a vector."""
        trained = self.config.vectors.dim if of_vectors(self.config) else 0
        return trained or self.config.model.decoder.width

    def generate(
        self, pictures: Picture | Sequence[Picture], prompt: str, max_new: int = 64, **sampling: Any
    ) -> str:
        """The model's answer.

        Args:
            pictures: one, several, or none (``[]``).
            prompt: what to ask; ``<image>`` marks where each picture goes. Without a mark the
                pictures come first.
            max_new: new tokens at most.
            **sampling: ``temperature`` (0, the default, is greedy), ``top_k``, ``top_p``, ``seed``.

        Raises:
            ConfigError: marks and pictures differ in number, or a setting is out of range.
            DataError: a picture can't be read.
        """
        return self.generate_batch([(_listed(pictures), prompt)], max_new, **sampling)[0]

    def generate_batch(
        self,
        queries: Sequence[tuple[Sequence[Picture], str]],
        max_new: int = 64,
        **sampling: Any,
    ) -> list[str]:
        """Answers to several (pictures, prompt) pairs at once; see :meth:`generate`."""
        *_, last = self._texts(queries, max_new, **sampling)
        return [answer.strip() for answer in last]

    def short_answers(self, queries: Sequence[tuple[Sequence[str], str]]) -> list[str]:
        """Answers of a few words each, as a page of predictions shows them."""
        return self.generate_batch(queries, max_new=16)

    def stream(
        self, pictures: Picture | Sequence[Picture], prompt: str, max_new: int = 64, **sampling: Any
    ) -> Iterator[str]:
        """The answer in pieces, as it is made; arguments as :meth:`generate`."""
        said = ""
        for (text,) in self._texts([(_listed(pictures), prompt)], max_new, **sampling):
            text = text.lstrip() if not said else text
            whole = text.rstrip("\ufffd ")  # half of a character, or the space before a word
            if whole.startswith(said) and whole != said:
                yield whole[len(said) :]
                said = whole

    def embed(
        self,
        queries: Sequence[tuple[Sequence[Picture], str]],
        instruction: str = chat.INSTRUCTION,
        dims: int = 0,
    ) -> np.ndarray:
        """Vectors of unit length, one for each (pictures, text) pair; either may be empty.

        Args:
            queries: pairs, as for :meth:`generate_batch`.
            instruction: what they are for; the model reads it as the system's turn.
            dims: of a vector, the first so many; 0 is all.

        Returns:
            f32[len(queries), D].

        Raises:
            ConfigError: marks and pictures differ in number, or there are not so many dims.
            DataError: a picture can't be read.
        """
        if not 0 <= dims <= self.width:
            raise ConfigError(f"dims={dims}: the model's vectors have {self.width}")
        if of_vectors(self.config) and self.config.vectors.pool == TOKENS:
            raise ConfigError("this model makes a vector of each token, not one of a row")
        batch = prompts.batch(
            queries,
            self.model,
            self.tokenizer,
            self.pictures,
            self.config.data.max_pixels,
            instruction,
        )
        return np.asarray(self._embed(self.params, batch, dims))[: len(queries)]

    def _texts(
        self,
        queries: Sequence[tuple[Sequence[Picture], str]],
        max_new: int,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> Iterator[list[str]]:
        """The answers so far, every few tokens."""
        if max_new < 1 or temperature < 0 or top_k < 0 or not 0 < top_p <= 1:
            raise ConfigError(
                f"max_new={max_new} must be at least 1, temperature={temperature:g} and "
                f"top_k={top_k} at least 0, and top_p={top_p:g} above 0 and at most 1"
            )
        self._check_answers()
        how = Sampling(temperature, top_k, top_p, self.tokenizer.stop_ids)
        batch = prompts.batch(
            queries, self.model, self.tokenizer, self.pictures, self.config.data.max_pixels
        )
        capacity = -(-max_new // _CAPACITY_STEP) * _CAPACITY_STEP
        state = self._prefill(self.params, batch, how, capacity, jax.random.key(seed))
        new: list[list[int]] = [[] for _ in queries]
        for _ in range(0, max_new, _CHUNK):
            state, tokens, done = self._decode(self.params, state, how, _CHUNK)
            for row, more in zip(new, np.asarray(tokens).tolist()):
                row += more
            yield [self._text(row[:max_new]) for row in new]
            if np.asarray(done):
                return

    def _check_answers(self) -> None:
        if of_vectors(self.config):
            raise ConfigError("this model was trained to make vectors, and answers nothing")
        if not self.config.model.decoder.head:
            raise ConfigError("this model has no output matrix: it embeds, and answers nothing")

    def _text(self, ids: list[int]) -> str:
        ends = (*self.tokenizer.stop_ids, -1)
        stop = next((i for i, token in enumerate(ids) if token in ends), len(ids))
        return self.tokenizer.decode(ids[:stop])

    def _start(
        self, params: Params, batch: Batch, sampling: Sampling, capacity: int, key: jax.Array
    ) -> Decoding:
        d = self.model.config.decoder
        shape = (d.depth, d.num_kv_heads, d.head_dim)
        return prefill(self.model.module(params), batch, sampling, capacity, shape, key)

    def _go_on(
        self, params: Params, state: Decoding, sampling: Sampling, count: int
    ) -> tuple[Decoding, jax.Array, jax.Array]:
        state, tokens = decode(self.model.module(params), state, sampling, count)
        return state, tokens, jnp.all(state.done)

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
        self._check_answers()
        spec = spec or self.config.data.eval
        if not spec:
            raise ConfigError("eval: the run has no config.data.eval; give --data=FILE")
        dataset = make_dataset(self.config, spec, self.tokenizer, self.pictures)
        parts = batch_shards(self.model.mesh)
        rows = -(-self.config.data.batch_size // parts) * parts
        report = Scorer(self.model, dataset, rows).report(self.params, limit, blind)
        if sheet:
            sheets.contact_sheet(self.short_answers, dataset, pathlib.Path(sheet))
        return report


def _listed(pictures: Picture | Sequence[Picture]) -> list[Any]:
    return [pictures] if isinstance(pictures, _ONE) else list(pictures)


def load(
    folder: str | os.PathLike[str],
    which: str = "best",
    mesh: Any = None,
    adapter: str | os.PathLike[str] = "",
    dtype: str = "",
) -> Loaded | encoder.Encoder:
    """A trained model, from a run's folder or a Hugging Face checkpoint.

    A model that makes vectors (CLIP, SigLIP, a sentence-transformers folder) comes as an
    :class:`~jaxvlm.build.encoder.Encoder`.

    Args:
        folder: a workdir of ``jaxvlm train``, a folder with ``config.json`` and safetensors, or
            an id of the hub.
        which: of a workdir: ``best`` (by the run's metric; the latest where none was evaluated)
            or ``latest``.
        mesh: MeshConfig; all devices on ``data`` if ``None``.
        adapter: of a checkpoint: a PEFT adapter folder (LoRA, DoRA) to answer with.
        dtype: of the computation, ``float32`` or ``bfloat16``; "" is the run's, and float32 for a
            checkpoint.

    Raises:
        ConfigError: the folder holds neither, or the adapter does not fit it.
        CheckpointError: no checkpoint can be read.
    """
    record.local_folder("checkpoint", folder)
    hugging_face = pretrained.is_checkpoint(folder)
    workdir = pathlib.Path(folder)
    if hugging_face:
        lora = LoraConfig(checkpoint=str(adapter))
        # Rows are as long as their records need, up to a length that no chat reaches.
        data = DataConfig(max_length=16_384, max_images=128, packing=False, buckets=32)
        config = TrainConfig(model=ModelConfig(checkpoint=str(folder), lora=lora), data=data)
        source = pretrained.find(str(folder), choose=any_family)
        if source is not None and source.family in ENCODERS.values():
            if adapter:
                raise ConfigError(
                    f"adapter={adapter}: {folder} is an encoder, which takes none yet"
                )
            return encoder.load(source, mesh, dtype)
        config = adapters.with_adapter(pretrained.with_source(config, source), source, None)
        if source is not None and (modules := pretrained.modules(source.files)):
            pooling = pretrained.module_config(source.files, modules)
            sentences.check_last(modules, pooling, config.model.decoder.width)
    elif adapter:
        raise ConfigError(
            f"adapter={adapter}: {folder} is a run, which has its own weights; export it first "
            "(jaxvlm export --merged)"
        )
    else:
        config = record.read_config(workdir)
        if of_vectors(config) and config.encoder == "dual":
            return _encoder(config, workdir, which, mesh, dtype)
        source = pretrained.find(config.model.checkpoint, workdir)
    keep_freed_memory()
    use_compile_cache(config.compile_cache)
    saved = None if hugging_face else workdir / "tokenizer"
    tokenizer = make_tokenizer(config, saved, tuple, source)
    pretrained.check_tokens(source, tokenizer)
    config = dataclasses.replace(config, model=with_vocab(config.model, tokenizer.vocab_size))
    settings = dataclasses.replace(config.model, dtype=dtype or config.model.dtype)
    config = dataclasses.replace(config, model=settings)
    vectors = config.vectors if of_vectors(config) else None
    model = build_model(settings, make_mesh(mesh or MeshConfig()), vectors=vectors)
    pictures = pretrained.pictures(config, source, tokenizer)
    if hugging_face and source is not None:
        params = adapters.read_params(source, model, config.seed)
    else:
        choice = (config.checkpoint.metric, config.checkpoint.mode)
        params = restore_params(workdir / "checkpoints", model.abstract(), which, *choice)
    return Loaded(config, model, params, tokenizer, pictures)


def _encoder(
    config: TrainConfig, workdir: pathlib.Path, which: str, mesh: Any, dtype: str
) -> encoder.Encoder:
    """The dual encoder of a run."""
    keep_freed_memory()
    use_compile_cache(config.compile_cache)
    made = dual.make(config, workdir, tuple)
    settings = dataclasses.replace(made.config, dtype=dtype or made.config.dtype)
    model = build_model(settings, make_mesh(mesh or MeshConfig()))
    choice = (config.checkpoint.metric, config.checkpoint.mode)
    params = restore_params(workdir / "checkpoints", model.abstract(), which, *choice)
    config = dataclasses.replace(config, dual=settings)
    return encoder.Encoder(made.source, model, params, made.tokenizer, made.pictures, config)
