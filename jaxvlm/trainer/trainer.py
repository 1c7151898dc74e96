"""A training run as a story: settings, mesh, data, model, train step, callbacks, loop."""

from __future__ import annotations

import contextlib
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import jax

from jaxvlm.cache.settings import allocate_pages
from jaxvlm.config import ConfigError, uses_cache
from jaxvlm.losses.registry import trains_embeddings
from jaxvlm.parallel.distributed import processes
from jaxvlm.parallel.sharding import local_rows
from jaxvlm.train import loop
from jaxvlm.train.callbacks import Callback, CallbackList
from jaxvlm.trainer import checks, embedding_run, inputs, layout, run_files
from jaxvlm.trainer.callbacks import checkpoint, evaluation, metrics
from jaxvlm.trainer.callbacks.cache import CacheCallback, CacheTiers
from jaxvlm.trainer.callbacks.islands import IslandCallback
from jaxvlm.trainer.run import Run
from jaxvlm.trainer.training import build_training, total_steps, trained_paths
from jaxvlm.types import trains_vision


class Trainer(Run):
    """One training run in one folder.

    Args:
        config: what a recipe's ``get_config`` returns: a Config, or a ConfigDict of its keys.
        workdir: the run's folder, or ``gs://bucket/run``; a run that is in it is resumed. All that
            a run writes is there.
        devices: which devices the mesh is made of; all by default.
        callbacks: what happens around steps besides; see :class:`jaxvlm.Callback`.
        name: in front of the run's lines, where one process has several runs.

    Raises:
        ConfigError, DataError: settings or data that can't be used.
    """

    def __init__(
        self,
        config: Any,
        workdir: str | pathlib.Path = "",
        devices: Sequence[jax.Device] | None = None,
        callbacks: Sequence[Callback] = (),
        name: str = "",
    ):
        self.callbacks, self.name, self.began = callbacks, name, time.time()
        config = checks.checked(config, workdir, callbacks)
        self.workdir = run_files.folder_of(workdir) if workdir else None
        processes.set_up_process(config.compile_cache)
        devices = jax.devices() if devices is None else list(devices)
        self.auto = checks.auto_settings(config)
        if self.auto:
            from jaxvlm.trainer.auto_parallel import resolve_auto  # loads the planner

            how = (devices, self.log, checks.check_lengths, self.workdir)
            config = resolve_auto(config, *how)
        # Mesh: before any file is read, so that one that does not fit is refused at once.
        mesh = None if layout.is_by_cost(config) else layout.lay_out(config, devices)
        # Data, and the checkpoint that says what the model is.
        pairs = trains_embeddings(config)
        prepare = embedding_run.prepare_pairs if pairs else inputs.prepare_conversations
        prepared = prepare(mesh.config if mesh else config, self.workdir)
        config, self.source, self.tokenizer, self.image_format, self.dataset, self.dual = prepared
        self.steps = total_steps(config, lambda: self.dataset.steps_per_epoch)
        # Model, on its mesh.
        placed = layout.place(config, mesh, devices, prepared, self.workdir, self.log)
        self.config, self.mesh = placed.config, placed.mesh
        self.model, self.encoder = placed.model, placed.encoder
        self.rows = local_rows(self.mesh, self.config.data.batch_size)
        # Train step: built here, so that what can't be used is refused before a file is written.
        self.pages = None
        if uses_cache(self.config.cache):
            learns = trains_vision(trained_paths(self.model, self.config))
            self.pages = allocate_pages(self.config, self.dataset, learns)
        self.training = build_training(
            self.config, self.model, self.steps, self.log, encoder=self.encoder, pages=self.pages
        )
        checks.check_loss(self.config, self.model, self.dataset, self.rows)

    def fit(self) -> dict[str, Any]:
        """Train to the end, or until SIGTERM; resume what the workdir holds.

        Returns:
            ``step``, why it ended (``ended``), ``seconds`` of training, and the last
            evaluation's figures.

        Raises:
            TrainingStopped: the run can't go on; the message says what to do.
        """
        if self.workdir is None:
            raise ConfigError("fit needs a folder: jaxvlm.Trainer(config, workdir=...)")
        processes.catch_signals()
        with contextlib.ExitStack() as stack:
            # The first state, from the workdir's newest checkpoint or from initial weights.
            checkpointer, lines = run_files.open_workdir(self, self.workdir, stack)
            state, start, extra = checkpoint.restore_or_init(self, checkpointer, lines.append)
            evaluator = evaluation.make_evaluator(self)
            # The run's files only now: a config that fails must not replace the run's own.
            run_files.write_run_files(self, self.workdir)
            progress = run_files.open_progress(self, start, lines, stack)
            log = self.training.step.log = progress.log
            # Batches, and the tiers of the visual-token cache that fill them.
            caches = None
            if self.has_cache(extra):
                caches = CacheTiers(self, state, start, extra, log, stack)
            memory, host_cache = (caches.memory, caches.host) if caches else (None, None)
            source = stack.enter_context(contextlib.closing(self.dataset.train(self.rows, start)))
            batches = inputs.GlobalBatches(source, self.training.place, host_cache)
            # Callbacks: what happens around the steps.
            writer = run_files.open_writer(self, self.workdir, start, stack)
            estimate = metrics.memory_callback(self, batches.peek(), log)
            logs = metrics.introduce(self, batches.peek(), writer, progress)
            evaluations = evaluation.callback(self, evaluator, memory, writer, progress, extra)
            flops = logs.flops_per_step
            caching = CacheCallback(caches, self, flops, checkpointer, log) if caches else None
            callbacks = CallbackList([
                IslandCallback(self, log) if self.training.outer else None, caching, evaluations,
                estimate, *self.callbacks, logs, checkpoint.PreemptionCallback(),
                checkpoint.CheckpointCallback(checkpointer, self.training, extra),
            ])  # fmt: skip
            # The loop. Tightly around it: a failure here reaches peers before anything waits.
            begin = time.perf_counter()
            with processes.guard_peers(), batches.explained(self):
                if evaluations and evaluations.catch_up(start, state):
                    ended = "no better"
                else:
                    state, ended = loop.train(
                        state, self.training.step, batches, run_files.schedule_of(self), callbacks,
                        start=start, leaves=self.training.leaves, extra=extra, cache_memory=memory,
                        goodput=writer.goodput,
                    )  # fmt: skip
            seconds = time.perf_counter() - begin
            checkpointer.wait()
            result = evaluation.finish(self, state, ended, evaluator, evaluations, writer, log)
            result |= {"plan": {}, "seconds": seconds}
            self.state = memory.restored(state) if memory else state
            callbacks.on_end(self.state, result)
            return result

    def dry_run(self) -> dict[str, Any]:
        """Compile the step, print one batch with its loss mask and the memory; train nothing."""
        from jaxvlm.trainer.dry_run import dry_run  # loads the planner

        return dry_run(self)
