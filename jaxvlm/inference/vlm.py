"""Loads trained models, and generates answers and embeddings with them."""

from __future__ import annotations

import functools
import logging
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxvlm.config import (
    Config,
    ConfigError,
)
from jaxvlm.data.conversations import tokenize
from jaxvlm.data.conversations.dataset import make_dataset
from jaxvlm.data.images import image_files
from jaxvlm.data.tokenizer.chat_tokenizer import ChatTokenizer
from jaxvlm.inference import (
    generated_answers,
    input_types,
    kv_compression,
    prompts,
    prompts_to_embed,
)
from jaxvlm.inference.embed_sequences import embed_sequences
from jaxvlm.inference.evaluator import Evaluator, Report
from jaxvlm.inference.generate import (
    Compression,
    DecodeState,
    Sampling,
    SharedPrefixes,
    decode,
    prefill,
)
from jaxvlm.inference.kv_compression import KVMemory
from jaxvlm.inference.kv_policy import KVPolicy, policy_of, without_scores
from jaxvlm.inference.prediction_grid import write_prediction_grid
from jaxvlm.inference.prompts import ImageLike, Prompts, listed
from jaxvlm.inference.visual_tokens import VisualTokens
from jaxvlm.losses.registry import trains_embeddings
from jaxvlm.models.embedder import TOKENS
from jaxvlm.nn.norm import unit
from jaxvlm.parallel.mesh import batch_shards
from jaxvlm.parallel.rules import log_once
from jaxvlm.parallel.sharding import replicated
from jaxvlm.spmd.model import Model
from jaxvlm.types import Batch, Params

_log = logging.getLogger(__name__)
_CAPACITY_STEP = 64
"""The KV cache's capacity for new tokens is a multiple of it, so that few lengths are compiled."""
_TOKENS_PER_CALL = 16
"""Number of tokens that one call of the compiled decode generates; divides ``_CAPACITY_STEP``."""


class VLM:
    """A vision-language model with its parameters, tokenizer and image format.

    Args:
        config: settings of the run that trained it, with the vocabulary size filled in.
        model: model on its mesh.
        params: all parameters.
        tokenizer: tokenizer with the chat template.
        image_format: how the model takes images.
        own_input_types: how the model embeds ``query`` and ``document``; ``None``: as the run that
            trained it.
    """

    def __init__(
        self,
        config: Config,
        model: Model,
        params: Params,
        tokenizer: ChatTokenizer,
        image_format: image_files.ImageFormat,
        own_input_types: Mapping[str, input_types.InputType] | None = None,
    ):
        self.config, self.model, self.params = config, model, params
        self.tokenizer, self.image_format = tokenizer, image_format
        self._own_input_types = own_input_types
        self._longest_said = 0
        self.kv_memory: KVMemory | None = None
        """What the KV cache of the latest batch's prompts takes, if it is compressed."""
        self.cache: VisualTokens | None = None
        """Visual tokens of images seen before; see :meth:`use_cache`."""
        # Replicated on every device, since each process reads all answers.
        everywhere = replicated(model.mesh)
        self._prefill = jax.jit(self._start, static_argnums=(3, 4, 5))
        self._decode = jax.jit(
            self._continue,
            static_argnums=(2, 3),
            donate_argnums=1,
            out_shardings=(None, everywhere, everywhere),
        )
        self._embed = jax.jit(
            lambda params, batch, dims: self._embeddings(model.module(params), batch, dims),
            static_argnums=2,
            out_shardings=everywhere,
        )

    @property
    def input_types(self) -> Mapping[str, input_types.InputType]:
        """How the model embeds ``query`` and ``document``, as far as it is known."""
        own = self._own_input_types
        return input_types.of_run(self.config) if own is None else own

    def use_cache(self, memory_mb: int = 0, store: str | os.PathLike[str] = "") -> None:
        """Reads an image's visual tokens from the cache from now on, where it was encoded before.

        Args:
            memory_mb: maximum size of the tokens in host memory, in 2**20 bytes.
            store: folder of tokens on disk, such as the ``config.cache.store`` of a training run.

        Raises:
            ConfigError: a setting that can't be used.
        """
        if self.cache is not None:
            self.cache.close()  # so that a store is read with what was written
        how = (self.config, self.model, self.params, self.image_format)
        self.cache = VisualTokens(*how, memory_mb, os.fspath(store))

    def sample_videos(self, fps: float = 0.0, num_frames: int = 0) -> None:
        """Samples other frames of videos from now on than the run or the checkpoint says.

        Args:
            fps: frames a second; 0 leaves it.
            num_frames: frames of a video, whatever its length; 0 leaves it.
        """
        images = self.image_format
        self.image_format = images.with_videos(
            lambda: images.prepare.of_videos().sampled(fps, num_frames)
        )

    def current_cache(self) -> VisualTokens | None:
        """Returns the cache of the present parameters; other ones begin with an empty memory."""
        if self.cache is not None and not self.cache.is_of(self.params):
            self.use_cache(*self.cache.room)
        return self.cache

    def _embeddings(self, module: Any, batch: Batch, dims: int) -> jax.Array:
        if trains_embeddings(self.config):
            embeddings = module.embed(batch).hidden
            return unit(embeddings[:, :dims]) if dims else embeddings
        return embed_sequences(module, batch, dims)

    @property
    def width(self) -> int:
        """Number of dims of an embedding."""
        trained = self.config.embedding.dim if trains_embeddings(self.config) else 0
        return trained or self.config.model.decoder.width

    def generate(
        self,
        images: ImageLike | Sequence[ImageLike],
        prompt: str,
        max_new_tokens: int = 64,
        **options: Any,
    ) -> str:
        """Generates an answer to a prompt about images.

        Args:
            images: one image, several, or none (``[]``); ``jaxvlm.video(FILE)`` is a video.
            prompt: prompt in which ``<image>``, or ``<video>``, marks where each goes; without
                marks the images come first.
            max_new_tokens: maximum number of tokens to generate.
            **options: ``temperature`` (0, the default, is greedy), ``top_k``, ``top_p``, ``seed``;
                ``kv``, the method by which the prompt's KV cache is compressed ("none" by default),
                ``kv_budget`` and others of :func:`jaxvlm.inference.kv_policy.policy_of`.

        Returns:
            The answer, without outer space.

        Raises:
            ConfigError: the numbers of marks and images differ, or a setting is out of range.
            DataError: an image can't be read.
        """
        return self.generate_batch([(listed(images), prompt)], max_new_tokens, **options)[0]

    def generate_batch(
        self,
        queries: Sequence[tuple[Sequence[ImageLike], str]],
        max_new_tokens: int = 64,
        **options: Any,
    ) -> list[str]:
        """Generates answers to (images, prompt) pairs in one batch; see :meth:`generate`."""
        if not queries:
            return []
        *_, last = self._texts(queries, max_new_tokens, **options)
        return [answer.strip() for answer in last]

    def short_answers(self, queries: Sequence[tuple[Sequence[str], str]]) -> list[str]:
        """Generates answers of at most 16 tokens, as a prediction grid shows them."""
        return self.generate_batch(queries, max_new_tokens=16)

    def stream(
        self,
        images: ImageLike | Sequence[ImageLike],
        prompt: str,
        max_new_tokens: int = 64,
        **options: Any,
    ) -> Iterator[str]:
        """Yields the answer in pieces as it is generated; arguments as for :meth:`generate`."""
        sent = ""
        for (text,) in self._texts([(listed(images), prompt)], max_new_tokens, **options):
            text = text.lstrip() if not sent else text
            # An incomplete character, or the space before a word, waits for the next tokens.
            complete = text.rstrip("\ufffd ")
            if complete.startswith(sent) and complete != sent:
                yield complete[len(sent) :]
                sent = complete

    def embed(
        self,
        queries: Sequence[tuple[Sequence[ImageLike], str]],
        instruction: str = tokenize.INSTRUCTION,
        dims: int = 0,
        max_length: int = 0,
    ) -> np.ndarray:
        """Embeds (images, text) pairs, either of which may be empty.

        The embeddings have unit length, unless the run trained others (``embedding.normalize``).

        Args:
            queries: pairs, as for :meth:`generate_batch`.
            instruction: instruction that the model reads as the system turn.
            dims: number of dims to truncate embeddings to, at unit length again; 0 keeps all.
            max_length: maximum number of tokens of an item, whose text is truncated; 0 is no limit.

        Returns:
            f32[len(queries), D].

        Raises:
            ConfigError: the numbers of marks and images differ, or the embeddings have fewer dims.
            DataError: an image can't be read.
        """
        if not 0 <= dims <= self.width:
            raise ConfigError(f"dims={dims}: the model's embeddings have {self.width}")
        if trains_embeddings(self.config) and self.config.embedding.pool == TOKENS:
            raise ConfigError("this model computes an embedding per token, not one per item")
        how = (self.model, self.tokenizer, self.image_format, self.config.data.max_pixels)
        batch = prompts_to_embed.batch(queries, *how, instruction, max_length, self.current_cache())
        return np.asarray(self._embed(self.params, batch, dims))[: len(queries)]

    def _texts(
        self,
        queries: Sequence[tuple[Sequence[ImageLike], str]],
        max_new_tokens: int,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        **kv: Any,
    ) -> Iterator[list[str]]:
        """Yields all answers so far, every few tokens."""
        if max_new_tokens < 1 or temperature < 0 or top_k < 0 or not 0 < top_p <= 1:
            raise ConfigError(
                f"max_new_tokens={max_new_tokens} must be at least 1, temperature={temperature:g} "
                f"and top_k={top_k} at least 0, and top_p={top_p:g} above 0 and at most 1"
            )
        self._check_answers()
        settings = Sampling(temperature, top_k, top_p, self.tokenizer.stop_ids)
        policy = self._policy(**kv) if kv else None
        how = (self.model, self.tokenizer, self.image_format, self.config.data.max_pixels)
        asked = prompts.to_answer(queries, *how, share=_shares(policy), cache=self.current_cache())
        data = self.config.data
        if data.train and asked.longest > max(data.max_length, self._longest_said):
            self._longest_said = asked.longest
            _log.warning(
                "a prompt has %s tokens, and the run was trained on sequences of at most %s "
                "(config.data.max_length): the answer may be worse",
                *(asked.longest, data.max_length),
            )
        yield from self._answers(asked, len(queries), max_new_tokens, settings, policy, seed)

    def _policy(self, **kv: Any) -> KVPolicy | None:
        policy = policy_of(**kv)
        if policy is not None:
            kv_compression.check_model(self.model.config.decoder)
        return policy

    def _answers(
        self,
        asked: Prompts,
        count: int,
        max_new_tokens: int,
        settings: Sampling,
        policy: KVPolicy | None,
        seed: int = 0,
    ) -> Iterator[list[str]]:
        """Yields the answers of the first ``count`` prompts so far, every few tokens."""
        capacity = -(-max_new_tokens // _CAPACITY_STEP) * _CAPACITY_STEP
        stages = self.model.mesh.shape["pipeline"]
        compression = policy and Compression(policy, self.tokenizer.image_id, stages)
        key = jax.random.key(seed)
        self.kv_memory = None
        how = (settings, capacity, compression, key)
        state = self._prefill(self.params, asked.batch, asked.prefixes, *how)
        if compression:
            depth = self.model.config.decoder.depth
            if line := without_scores(compression.policy, asked.length, depth):
                log_once(line)
            self.kv_memory = kv_compression.memory(state.kv, state.kept, asked.length)
        new: list[list[int]] = [[] for _ in range(count)]
        for _ in range(0, max_new_tokens, _TOKENS_PER_CALL):
            state, tokens, done = self._decode(self.params, state, settings, _TOKENS_PER_CALL)
            for row, more in zip(new, np.asarray(tokens).tolist()):
                row += more
            yield [self._text(row[:max_new_tokens]) for row in new]
            if np.asarray(done):
                return

    def _check_answers(self) -> None:
        if trains_embeddings(self.config):
            raise ConfigError("this model was trained for embeddings and can't generate answers")
        if not self.config.model.decoder.head:
            raise ConfigError(
                "this model has no output head: it computes embeddings and can't generate answers"
            )

    def _text(self, ids: list[int]) -> str:
        ends = (*self.tokenizer.stop_ids, -1)
        stop = next((i for i, token in enumerate(ids) if token in ends), len(ids))
        return self.tokenizer.decode(ids[:stop])

    def _start(
        self,
        params: Params,
        batch: Batch,
        prefixes: SharedPrefixes | None,
        sampling: Sampling,
        capacity: int,
        compression: Compression | None,
        key: jax.Array,
    ) -> DecodeState:
        d = self.model.config.decoder
        shape = (d.depth, d.num_kv_heads, d.head_dim)
        how = (sampling, capacity, shape, key, compression, prefixes)
        return prefill(self.model.module(params), batch, *how)

    def _continue(
        self, params: Params, state: DecodeState, sampling: Sampling, count: int
    ) -> tuple[DecodeState, jax.Array, jax.Array]:
        state, tokens = decode(self.model.module(params), state, sampling, count)
        return state, tokens, jnp.all(state.done)

    def evaluate(
        self,
        spec: str = "",
        limit: int = 0,
        prediction_grid: str = "",
        blind: bool = True,
        seed: int = 0,
        batch_size: int = 0,
        **kv: Any,
    ) -> Report:
        """Measures exact match on a data file, with and without the right images.

        Args:
            spec: data file; ``data.eval`` of the run if empty.
            limit: maximum number of records; 0 means all.
            prediction_grid: PNG file to draw images with the model's answers to; "" for none.
            blind: whether to run the control with other records' images.
            seed: of the places that the method ``random`` keeps.
            batch_size: number of prompts that are read together, over all devices; 0 is the run's.
            **kv: how prompts' KV caches are compressed, as for :meth:`generate`; answers are then
                generated, and have no loss.

        Raises:
            ConfigError: neither ``spec`` nor the run names a data file, or ``kv`` can't be used.
        """
        self._check_answers()
        policy = self._policy(**kv)
        spec = spec or self.config.data.eval
        if not spec:
            raise ConfigError("eval: the run has no config.data.eval; give --data=FILE")
        dataset = make_dataset(self.config, spec, self.tokenizer, self.image_format)
        shards = batch_shards(self.model.mesh)
        batch_size = -(-(batch_size or self.config.data.batch_size) // shards) * shards
        if policy is None:
            run = (self.params, limit, blind)
            report = Evaluator(self.model, dataset, batch_size, self.current_cache()).report(*run)
        else:
            answer = functools.partial(self._compressed_answers, policy, seed)
            report = generated_answers.evaluate(answer, dataset, batch_size, limit, blind)
        if prediction_grid:
            memory = self.kv_memory  # of the evaluation's last batch
            answer_in_short = functools.partial(
                self.generate_batch, max_new_tokens=16, seed=seed, **kv
            )
            write_prediction_grid(answer_in_short, dataset, pathlib.Path(prediction_grid))
            self.kv_memory = memory
        return report

    def _compressed_answers(
        self,
        policy: KVPolicy,
        seed: int,
        ids: Sequence[np.ndarray],
        images: Sequence[Sequence[str]],
        example_ids: Sequence[int],
        max_new_tokens: int,
    ) -> list[str]:
        how = (self.model, self.tokenizer, self.image_format, self.config.data.max_pixels)
        asked = prompts.of_ids(
            ids, images, example_ids, *how, _shares(policy), self.current_cache()
        )
        settings = Sampling(stop_ids=self.tokenizer.stop_ids)
        *_, last = self._answers(asked, len(ids), max_new_tokens, settings, policy, seed)
        return last


def _shares(policy: KVPolicy | None) -> bool:
    """Whether questions about the same images may read them once.

    Not where the scorer looks from the prompt's last tokens, wherever these are (SnapKV's window).
    """
    return policy is None or policy.scorer != "snapkv"
