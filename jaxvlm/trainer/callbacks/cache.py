"""The visual-token cache around the steps: what leaves the devices, its metrics, its memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax

from jaxvlm.cache import host_cache_files
from jaxvlm.cache import metrics as cache_metrics
from jaxvlm.cache.cached_step import TOKENS
from jaxvlm.cache.host_cache import HOST_CACHE, HostCache, open_host_cache
from jaxvlm.cache.metrics import LOST
from jaxvlm.cache.settings import pages_written, token_layout, with_encode_batch
from jaxvlm.cache.tier_bytes import tier_bytes
from jaxvlm.cache.writer import (
    CacheWriter,
    default_drift_warning,
    open_cache_writer,
    processes_share_sequences,
)
from jaxvlm.checkpoint.checkpointer import Checkpointer
from jaxvlm.checkpoint.run_record import url_of
from jaxvlm.config import cache_halvings
from jaxvlm.data.page_allocation import WrittenPages
from jaxvlm.models.model_flops import Flops
from jaxvlm.train import program_memory
from jaxvlm.train.cache_memory import CacheMemory
from jaxvlm.train.callbacks import Callback, CheckpointRecord, StepBatch
from jaxvlm.train.gradcache import rows_of
from jaxvlm.train.loop import TrainingStopped
from jaxvlm.trainer.run import Run
from jaxvlm.types import Batch, Pairs, TrainState

_LOWER_STALENESS = "lower config.cache.max_staleness"
_FROZEN_DRIFT = (
    "a frozen encoder's should be the same: look at the store with `jaxvlm cache verify`, or leave "
    "it out; config.cache.identity='all' takes no tokens of other machines and versions"
)


class CacheTiers:
    """The tiers of a run's visual-token cache outside of the train state.

    Args:
        run: built; its data is told where to look for tokens.
        state: the first state; its weights are part of the store's identity.
        start: the step that the run starts at.
        extra: what was saved with the checkpoint that it resumes from.
        log: prints a line.
        stack: closes what is opened here.
    """

    def __init__(
        self,
        run: Run,
        state: TrainState,
        start: int,
        extra: dict[str, Any],
        log: Callable[[str], None],
        stack: contextlib.ExitStack,
    ):
        config, training = run.config, run.training
        assert run.workdir is not None
        self.folder = run.workdir / HOST_CACHE
        self.device_bytes = sum(program_memory.bytes_of(x) for x in jax.tree.leaves(state.cache))
        self.writer: CacheWriter | None = open_cache_writer(
            run.cache_inputs,
            lambda: training.params(state),
            with_encode_batch(config, run.mesh).encode_batch,
            token_layout(config.cache, config.network),
            log,
        )
        if self.writer:
            stack.callback(self.writer.close)
        self.host = self._open_host_cache(run, start, extra.get(HOST_CACHE), log, stack)
        self.memory: CacheMemory = training.cache_memory(cache_halvings(config.cache), log)
        self.pages: WrittenPages | None = self._track_pages(run, stack)

    def _open_host_cache(
        self,
        run: Run,
        start: int,
        wanted: dict[str, Any] | None,
        log: Callable[[str], None],
        stack: contextlib.ExitStack,
    ) -> HostCache | None:
        """Tokens of a trained encoder in host memory, those saved with the checkpoint included."""
        host = open_host_cache(run.cache_inputs, log)
        if host:
            stack.callback(host.close)
            host.load(self.folder, start, wanted)
        elif wanted:
            log(
                f"{self.folder / str(start)}: the checkpoint's visual tokens in host memory are "
                "not used, because these settings keep none there; losses differ from those of "
                "the run as it was"
            )
        return host

    def _track_pages(self, run: Run, stack: contextlib.ExitStack) -> WrittenPages | None:
        """Which pages are written, shared with the data and with what may evict them.

        ``None`` too where processes share sequences: what each knows, and when, may differ.
        """
        pages = pages_written(run.config.cache, run.pages, run.training.learns)
        if pages is None or processes_share_sequences(run.cache_inputs):
            return None
        run.dataset.omit_written(pages)
        stack.callback(run.dataset.omit_written, None)
        self.memory.on_evict = pages.forget
        return pages

    def bytes_by_tier(self) -> dict[str, int]:
        """Bytes of visual tokens that this process keeps."""
        return tier_bytes(self.device_bytes >> self.memory.halved, self.writer, self.host)


class CacheCallback(Callback):
    """Takes the tokens that steps encoded, logs the cache's metrics, and saves its host tier.

    Args:
        caches: the tiers outside of the train state.
        run: of them.
        flops: model FLOPs of a mean step that encodes all its images.
        checkpointer: says which checkpoints there are.
        log: prints a line.
    """

    def __init__(
        self,
        caches: CacheTiers,
        run: Run,
        flops: Flops,
        checkpointer: Checkpointer,
        log: Callable[[str], None],
    ):
        self.caches, self.flops = caches, flops
        self.checkpointer, self.log = checkpointer, log
        cache, learns = run.config.cache, run.training.learns
        default = 0.0 if learns else default_drift_warning(cache.codec)
        self.drift_warning = cache.drift_warning or default
        self.advice = _LOWER_STALENESS if learns else _FROZEN_DRIFT
        self.drift = 0.0
        """The largest since the last line, as the host measured it."""

    def on_dispatch(self, batch: StepBatch, metrics: dict[str, Any]) -> None:
        """Take what the step encoded."""
        tokens = metrics.pop(TOKENS, None)
        local, caches = batch.local, self.caches
        if caches.pages is not None:
            assert isinstance(local, Batch)  # pairs have no pages
            caches.pages.take(local)
        if caches.host is not None:
            assert isinstance(batch.given, Batch)
            caches.host.write(batch.given, tokens)
        if caches.writer is None:
            return
        columns, of_columns = [local], [tokens]
        if isinstance(local, Pairs) and tokens:
            columns, of_columns = [local.query, rows_of(local.document)], tokens
        for rows, encoded in zip(columns, of_columns):
            if encoded is not None and isinstance(rows, Batch):
                caches.writer.write(rows, encoded)
        self.drift = max(self.drift, caches.writer.max_drift())

    def on_step_end(self, step: int, metrics: dict[str, float]) -> None:
        """What the step wrote into pages is there, if its update was good."""
        if lost := int(metrics.pop(LOST, 0)):
            raise TrainingStopped(
                f"step {step}: the visual tokens of {lost} images are not on the devices, where "
                "a step before has written them; its update is skipped. Resume from the last "
                "checkpoint, and please report it; config.cache.policy='off' does without"
            )
        if self.caches.pages is not None:
            self.caches.pages.settle(metrics["bad_in_a_row"] == 0)

    def on_log(self, step: int, metrics: dict[str, float]) -> None:
        """Add the time that hits saved, bytes by tier, and the drift, which may be warned of."""
        if "cache/hit_rate" in metrics:
            spent = self.flops.vision, self.flops.total, metrics["step_ms"]
            saved = cache_metrics.saved(metrics["cache/hit_rate"], *spent)
            if saved is not None:
                metrics["cache/saved_ms"] = saved
            sizes = self.caches.bytes_by_tier()
            metrics |= {f"cache/{tier}_mib": size / 2**20 for tier, size in sizes.items()}
        if "cache/drift_max" in metrics:
            drift = metrics["cache/drift_max"] = max(metrics["cache/drift_max"], self.drift)
            self.drift = 0.0
            if 0 < self.drift_warning < drift:
                self.log(
                    f"step {step}: cached visual tokens differ by {drift:.2g} of their norm from "
                    "what the vision encoder makes now, more than "
                    f"config.cache.drift_warning={self.drift_warning:g}; {self.advice}"
                )

    def on_save(self, step: int, state: TrainState, record: CheckpointRecord) -> None:
        """Note which host tier the checkpoint goes with."""
        if self.caches.host is not None:
            record.extra[HOST_CACHE] = self.caches.host.checkpoint_record

    def after_save(self, step: int, state: TrainState, record: CheckpointRecord) -> None:
        """Save the host tier once the checkpoint is on its way; let the cache grow again."""
        if record.written:
            # Of a run in an object store each process has a folder of its own.
            if url_of(self.caches.folder.parent) or not jax.process_index():
                steps: Any = self.checkpointer.all_steps()
                host_cache_files.prune(self.caches.folder, step, steps)
            if self.caches.host is not None:
                self.caches.host.save(self.caches.folder, step)
        self.caches.memory.grow(state)
