"""A training run, from settings to a trained model."""

from __future__ import annotations

import dataclasses
import pathlib
import time
from typing import Any

import jax
import numpy as np

from jaxvlm.build import inputs, record, sheets, training
from jaxvlm.build.hooks import RunHooks
from jaxvlm.build.loaded import Loaded
from jaxvlm.build.model import Model, build_model
from jaxvlm.build.preview import preview
from jaxvlm.build.scorer import Scorer
from jaxvlm.build.setup import peak_flops, use_compile_cache
from jaxvlm.config import ConfigError, TrainConfig, from_config_dict
from jaxvlm.data.iterate import TrainBatches, resume_step
from jaxvlm.io.checkpoint import Checkpointer, restore_params
from jaxvlm.parallel import distributed
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.sharding import local_rows, to_global
from jaxvlm.train import loop, programs
from jaxvlm.train.metrics import MetricWriter, Progress
from jaxvlm.types import Batch, TrainState

_ADVICE = [
    "raise config.microbatches (exact, a little slower)",
    "config.model.decoder.remat=dots, then full (about a third slower)",
    "config.mesh.fsdp=N over more devices",
    "lower config.data.batch_size or config.data.max_length",
]


class Run:
    """One training run in one folder.

    Args:
        config: a recipe's ConfigDict, or a TrainConfig.
        workdir: its folder; a run that is in it is resumed. Everything a run writes is there:
            ``config.json``, ``tokenizer/``, ``metrics.jsonl``, ``tensorboard/``,
            ``checkpoints/``, ``sheet.png``.

    Raises:
        ConfigError: settings that can't be used.
        DataError: data that can't be used.
    """

    def __init__(self, config: Any, workdir: str | pathlib.Path = ""):
        given = config if isinstance(config, TrainConfig) else from_config_dict(config)
        if not given.data.train:
            raise ConfigError("config.data.train names no data: a FILE.json, a FILE.jsonl, or easy-vqa:train")
        self.workdir = pathlib.Path(workdir) if workdir else None
        use_compile_cache(given.compile_cache)
        self.mesh = make_mesh(given.mesh)
        self.rows = local_rows(self.mesh, given.data.batch_size)
        read = inputs.read_records(given.data, given.data.train)
        saved = self.workdir / "tokenizer" if self.workdir else None
        self.tokenizer = inputs.make_tokenizer(given, saved, read)
        self.config = dataclasses.replace(
            given, model=inputs.with_vocab(given.model, self.tokenizer.vocab_size)
        )
        self.model: Model = build_model(self.config.model, self.mesh)
        self.dataset = inputs.make_dataset(self.config, given.data.train, self.tokenizer, read)
        self.steps = training.total_steps(self.config, lambda: self.dataset.steps_per_epoch)
        self.state: TrainState | None = None
        self._scorer: Scorer | None = None

    def fit(self) -> dict[str, Any]:
        """Train to the end, or until SIGTERM; resumes what the workdir holds.

        Returns:
            ``step``, why it ended (``ended``), ``seconds`` of training, and the last
            evaluation's figures.

        Raises:
            TrainingStopped: the run can't go on; the message says what to do.
        """
        if self.workdir is None:
            raise ConfigError("fit needs a folder: jaxvlm.Run(config, workdir=...)")
        distributed.catch_sigterm()
        self._write_down()
        progress = Progress(self.steps)
        try:
            with distributed.guard_peers():
                return self._fit(progress)
        finally:
            progress.close()

    def evaluate(self, blind: bool = True) -> dict[str, float]:
        """Exact match of the current weights on ``config.data.eval``."""
        return self.loaded().evaluate(blind=blind).metrics

    def generate(self, pictures: Any, prompt: str, **options: Any) -> str:
        """The current weights' answer; see ``Loaded.generate``."""
        return self.loaded().generate(pictures, prompt, **options)

    def loaded(self) -> Loaded:
        """The current weights as a model that answers.

        Raises:
            ConfigError: nothing is trained yet.
        """
        if self.state is None:
            raise ConfigError("this run has no weights yet: call fit() first")
        params = {**self.state.params, **self.state.frozen}
        return Loaded(self.config, self.model, params, self.tokenizer)

    def dry_run(self) -> dict[str, Any]:
        """Compile the step, print one batch with its loss mask and the memory; train nothing."""
        made = training.build_training(self.config, self.model, self.steps, print)
        local, meta = next(self.dataset.train(self.rows, 0))
        for line in preview(local, meta, self.dataset, self.tokenizer):
            print(line)
        batch = to_global(self.mesh, local, self.config.data.batch_size)
        memory = programs.memory(made.step.get(made.abstract, batch))
        for name, size in memory.items():
            print(f"memory on a device, {name}: {size / 2**20:.1f} MiB")
        return {"steps": self.steps, "memory": memory, "tokens": int((local.segment > 0).sum())}

    def _write_down(self) -> None:
        """The workdir's files that say what the run is."""
        assert self.workdir is not None
        if jax.process_index():
            return
        self.workdir.mkdir(parents=True, exist_ok=True)
        if (self.workdir / "config.json").is_file():
            for line in record.changes(record.read_config(self.workdir), self.config):
                print(f"changed since this run began: {line}", flush=True)
        if not (self.workdir / "tokenizer").is_dir():
            self.tokenizer.save(self.workdir / "tokenizer")
        kind = self.mesh.devices.flat[0].device_kind
        record.write_config(self.workdir, self.config, f"{self.mesh.size} x {kind}")

    def _fit(self, progress: Progress) -> dict[str, Any]:
        assert self.workdir is not None
        config = self.config
        made = training.build_training(config, self.model, self.steps, progress.log)
        checkpointer = Checkpointer(
            self.workdir / "checkpoints",
            config.checkpoint.keep,
            config.checkpoint.metric,
            config.checkpoint.mode,
            on_warning=progress.log,
        )
        state, start, extra = self._first_state(made, checkpointer, progress)
        train_batches = self.dataset.train(self.rows, start)
        batches = _GlobalBatches(train_batches, self.mesh, config.data.batch_size)
        flops, text = self._rates(made, batches)
        progress.log(text)
        writer = MetricWriter(self.workdir, config.tensorboard, config.wandb_project, start)
        peak, _ = peak_flops(self.mesh, config.model.dtype)
        hooks = RunHooks(
            config, writer, progress, checkpointer, self._evaluator(), made.learning_rate,
            flops, peak, best=extra.get("best"), worse=extra.get("worse", 0),
        )  # fmt: skip
        begin = time.perf_counter()
        try:
            state, why = loop.train(
                state, made.step, batches, self._schedule(), hooks, start=start, leaves=made.leaves
            )
        except jax.errors.JaxRuntimeError as error:
            if programs.is_out_of_memory(error):
                batch = batches.last
                text = programs.explain_out_of_memory(made.abstract, batch, {}, _ADVICE)
                raise loop.TrainingStopped(text) from error
            raise
        finally:
            train_batches.close()
            writer.close()
            checkpointer.close()
        self.state = state
        report = hooks.last_report
        if why == "done" and report is not None and jax.process_count() == 1:
            sheets.contact_sheet(self.loaded(), self._scorer.dataset, self.workdir / "sheet.png")  # type: ignore[union-attr]  # set with the report
            progress.log(f"contact sheet: {self.workdir / 'sheet.png'}")
        return {
            "step": int(jax.device_get(state.step)),
            "ended": why,
            "seconds": time.perf_counter() - begin,
            "skipped_updates": int(jax.device_get(state.guard.skipped)),
            "skipped_records": len(self.dataset.problems) + len(self.dataset.skipped),
            **(report.metrics if report else {}),
            **{f"blind/{k}": v for k, v in (report.blind if report else {}).items()},
        }

    def _first_state(
        self, made: training.Training, checkpointer: Checkpointer, progress: Progress
    ) -> tuple[TrainState, int, dict[str, Any]]:
        """The state to go on from, its step, and what was saved beside it."""
        found = checkpointer.restore(made.abstract)
        if found is not None:
            start = resume_step(found.extra["data"], self.dataset.fingerprint())
            progress.log(f"resuming at step {start} of {self.steps}")
            return found.state, start, found.extra
        if self.config.init_from:
            folder = pathlib.Path(self.config.init_from) / "checkpoints"
            params = restore_params(folder, self.model.abstract(), "latest")
            progress.log(f"weights from {self.config.init_from}")
        else:
            params = self.model.init(self.config.seed)
        return made.init(params), 0, {}

    def _evaluator(self) -> Any:
        """State -> Report on the evaluation data, or ``None`` without any."""
        config = self.config
        if not config.data.eval:
            return None
        dataset = inputs.make_dataset(config, config.data.eval, self.tokenizer)
        self._scorer = Scorer(self.model, dataset, config.data.batch_size)
        scorer = self._scorer
        return lambda state: scorer.report({**state.params, **state.frozen}, config.eval_records)

    def _schedule(self) -> loop.Schedule:
        config = self.config
        return loop.Schedule(
            steps=self.steps,
            log_every=config.log_every,
            eval_every=config.eval_every,
            save_every=config.checkpoint.every,
            max_bad_steps=config.max_bad_steps,
            profile=config.profile_steps,
            profile_folder=str(self.workdir / "profile") if self.workdir else "",
        )

    def _rates(self, made: training.Training, batches: _GlobalBatches) -> tuple[float, str]:
        """FLOPs of a mean step, and the line that says what is about to run."""
        local = batches.peek()
        scale = self.config.data.batch_size / len(self.rows)
        tokens = float((np.asarray(local.segment) > 0).sum()) * scale
        pictures = 0 if local.image_start is None else (np.asarray(local.image_start) >= 0).sum()
        flops = made.flops_per_step(local, tokens, float(pictures) * scale)
        size = sum(int(np.prod(x.shape)) for x in self.model.shapes.values())
        trained = sum(int(np.prod(self.model.shapes[p].shape)) for p in made.leaves)
        shape = " x ".join(f"{axis}={n}" for axis, n in self.mesh.shape.items())
        fill = tokens / (self.config.data.batch_size * local.tokens.shape[1])
        _, source = peak_flops(self.mesh, self.config.model.dtype)
        return flops, (
            f"{size:,} parameters, {trained:,} trained; mesh {shape}; {len(self.dataset.records):,} "
            f"records, {len(self.dataset.corpus.paths):,} pictures; {self.steps} steps of "
            f"{self.config.data.batch_size} rows, {100 * fill:.0f} % filled; "
            f"{flops / 1e9:.2f} GFLOP a step; MFU against {source}"
        )


class _GlobalBatches:
    """Local rows placed on the mesh, one batch ahead of the step."""

    def __init__(self, source: TrainBatches, mesh: jax.sharding.Mesh, batch_size: int):
        self.source, self.mesh, self.batch_size = source, mesh, batch_size
        self._peeked: Batch | None = None
        self._taken = source.state()
        self.last: Batch | None = None

    def __iter__(self) -> _GlobalBatches:
        return self

    def __next__(self) -> Batch:
        local = self.peek()
        self._peeked, self._taken = None, self.source.state()
        self.last = to_global(self.mesh, local, self.batch_size)
        return self.last

    def peek(self) -> Batch:
        """The next batch's local rows, not taken yet."""
        if self._peeked is None:
            self._peeked = next(self.source)[0]
        return self._peeked

    def state(self) -> dict[str, Any]:
        """The iterator's state after the batches that were taken."""
        return self._taken
