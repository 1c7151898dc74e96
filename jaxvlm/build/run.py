"""A training run, from settings to a trained model."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import math
import pathlib
import re
import shutil
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxvlm.build import (
    apart,
    caching,
    choice,
    exporting,
    inputs,
    pair_run,
    record,
    shares,
    training,
)
from jaxvlm.build.assemble import split
from jaxvlm.build.cache_inputs import CacheInputs
from jaxvlm.build.encoder import Encoder
from jaxvlm.build.fit import fit
from jaxvlm.build.loaded import Loaded
from jaxvlm.build.losses import check_name, of_vectors
from jaxvlm.build.model import Model, build_model
from jaxvlm.build.preview import preview
from jaxvlm.build.process import keep_freed_memory, use_compile_cache
from jaxvlm.build.record import local_folder
from jaxvlm.build.warm import open_warm
from jaxvlm.config import ConfigError, TrainConfig, from_config_dict
from jaxvlm.data import packing
from jaxvlm.parallel import distributed
from jaxvlm.parallel.mesh import make_mesh, mesh_text
from jaxvlm.parallel.sharding import local_rows
from jaxvlm.parallel.strategies import resolve
from jaxvlm.train import programs
from jaxvlm.train.apart import is_tower
from jaxvlm.types import Pairs, TrainState


class Run:
    """One training run in one folder.

    Args:
        config: a recipe's ConfigDict, or a TrainConfig.
        workdir: its folder; a run that is in it is resumed. Everything a run writes is there:
            ``config.json``, ``tokenizer/``, ``metrics.jsonl``, ``tensorboard/``,
            ``checkpoints/``, ``sheet.png``.
        devices: which devices the mesh is made of; all by default.

    Raises:
        ConfigError: settings that can't be used.
        DataError: data that can't be used.
    """

    def __init__(
        self,
        config: Any,
        workdir: str | pathlib.Path = "",
        devices: Sequence[jax.Device] | None = None,
    ):
        given = config if isinstance(config, TrainConfig) else from_config_dict(config)
        if not given.checkpoint.metric:
            metric = pair_run.METRIC if of_vectors(given) else "exact_match"
            checkpoint = dataclasses.replace(given.checkpoint, metric=metric)
            given = dataclasses.replace(given, checkpoint=checkpoint)
        _check(given)
        local_folder("--workdir", workdir)
        local_folder("config.init_from", given.init_from)
        self.workdir = pathlib.Path(workdir) if workdir else None
        keep_freed_memory()
        use_compile_cache(given.compile_cache)
        devices = jax.devices() if devices is None else list(devices)
        given = choice.settled(given, devices, _say, _check_rows, self.workdir)
        own: list[jax.Device] = []
        by_cost = given.tower.devices == shares.BY_COST
        if not by_cost:  # before any file is read, so that a wrong mesh is refused at once
            given, own = self._lay_out(given, devices)
        prepare = pair_run.prepare if of_vectors(given) else inputs.prepare
        made = prepare(given, self.workdir)
        self.config, self.source, self.tokenizer, self.pictures = made[:4]
        self.dataset, self.dual = made.dataset, made.dual
        self.steps = training.total_steps(self.config, lambda: self.dataset.steps_per_epoch)
        # Built here, so that a setting that can't be used is refused before a file is written.
        if by_cost:
            self._build_by_cost(devices)
        else:
            self._build(own)
        trained, _ = split(self.model, self.model.shapes, self.config.optim.frozen)
        learns = any(is_tower(path) for path in trained)
        self.slots = caching.slots_of(self.config, self.dataset, learns)
        self.training = training.build_training(
            self.config, self.model, self.steps, print, self.tower, self.slots
        )
        self.state: TrainState | None = None

    def _lay_out(
        self, config: TrainConfig, devices: Sequence[jax.Device]
    ) -> tuple[TrainConfig, list[jax.Device]]:
        """Make the mesh; returns ``config`` with its axes filled in, and the tower's devices."""
        own, devices = apart.devices_of(config.tower, devices)
        if own and config.strategy.name == "single" and len(devices) > 1:
            raise ConfigError(
                "config.strategy.name='single' runs on one device, and "
                f"config.tower.devices={len(own)} leaves {len(devices)}: take 'ddp'"
            )
        mesh, strategy = resolve(config.strategy, config.mesh, devices)
        config = dataclasses.replace(config, mesh=mesh, strategy=strategy)
        _check_rows(config)
        self.mesh = make_mesh(mesh, devices[:1] if strategy.name == "single" else devices)
        self.rows = local_rows(self.mesh, config.data.batch_size)
        return config, own

    def _build(self, own: list[jax.Device]) -> None:
        """The model, its vision tower on devices of its ``own`` where it has some."""
        config = self.config
        vectors = config.vectors if of_vectors(config) else None
        self.model: Model = build_model(
            config.network, self.mesh, config.strategy, not own, vectors=vectors
        )
        self.tower = apart.tower_of(self.model, config.tower, own) if own else None
        training.check_shards(config, self.model, self.tower)

    def _build_by_cost(self, devices: Sequence[jax.Device]) -> None:
        """Give the tower its share of the devices, or the nearest that this run can use."""
        given = self.config
        rows = np.arange(given.data.batch_size)
        with contextlib.closing(self.dataset.train(rows, 0)) as batches:
            cost = shares.costs(given, next(batches)[0])
        if len(devices) < 2 or not cost.tower:
            what = "one device" if len(devices) < 2 else "a first batch without pictures"
            raise ConfigError(f"config.tower.devices=-1 with {what}: leave it at 0")
        refused: dict[int, str] = {}
        order = shares.best_first(cost, len(devices))
        for count in order:
            tower = dataclasses.replace(given.tower, devices=count)
            try:
                self.config, own = self._lay_out(dataclasses.replace(given, tower=tower), devices)
                self._build(own)
            except ConfigError as error:
                refused[count] = str(error)
                continue
            share = cost.tower / sum(cost)
            print(
                f"config.tower.devices={count} of {len(devices)}: the tower has {share:.0%} of a "
                "step's FLOPs" + (f" ({_listed(refused)})" if refused else ""),
                flush=True,
            )
            return
        raise ConfigError(
            f"config.tower.devices=-1: no share of {len(devices)} devices can be used; "
            + _listed(refused)
        )

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
        if (self.workdir / "config.json").is_file() and not jax.process_index():
            for line in record.changed_settings(self.workdir, self.config):
                print(line, flush=True)
        self.state, result = fit(self, self.workdir)
        return result

    def evaluate(self, blind: bool = True) -> dict[str, float]:
        """Exact match, or how well vectors find, of the current weights on ``config.data.eval``.

        Args:
            blind: run the control too: another record's picture, or documents at random.
        """
        return pair_run.evaluate(self.loaded(), blind=blind).metrics

    def generate(self, pictures: Any, prompt: str, **options: Any) -> str:
        """The current weights' answer; see ``Loaded.generate``."""
        made = self.loaded()
        if isinstance(made, Encoder):
            raise ConfigError("this model makes vectors, and answers nothing")
        return made.generate(pictures, prompt, **options)

    def loaded(self) -> Loaded | Encoder:
        """The current weights as a model that answers, or makes vectors.

        Raises:
            ConfigError: nothing is trained yet.
        """
        if self.state is None:
            raise ConfigError("this run has no weights yet: call fit() first")
        return self.answering(self.state)

    def answering(self, state: TrainState) -> Loaded | Encoder:
        """The weights of ``state`` as a model that answers, or makes vectors."""
        params = self.training.params(state)
        if self.dual is not None:
            made = (self.source, self.model, params, self.tokenizer, self.pictures)
            return Encoder(*made, self.config)
        return Loaded(self.config, self.model, params, self.tokenizer, self.pictures)

    def dry_run(self) -> dict[str, Any]:
        """Compile the step, print one batch with its loss mask and the memory; train nothing."""
        made = self.training
        local, meta = next(self.dataset.train(self.rows, 0))
        of_pairs = isinstance(local, Pairs)
        if of_pairs:
            lines = [*pair_run.introduction(self, local), *pair_run.shown(self.dataset, meta)]
        else:
            lines = list(preview(local, meta, self.dataset, self.tokenizer))
        for line in lines:
            print(line)
        print(f"mesh {', vision tower on '.join(map(mesh_text, self.meshes))}")
        if warm := open_warm(self.cache_inputs, print):
            local = warm.fill(local)
        memory = programs.memory(made.step.get(made.abstract, made.place(local)))
        for name, size in memory.items():
            print(f"memory on a device, {name}: {size / 2**20:.1f} MiB")
        rows = [local.query, local.document] if of_pairs else [local]
        tokens = sum(int((x.segment > 0).sum()) for x in rows)
        return {"steps": self.steps, "memory": memory, "tokens": tokens}

    @property
    def cache_inputs(self) -> CacheInputs:
        """What the caches outside of the devices use of the run."""
        return CacheInputs(
            self.config, self.model, self.dataset, self.rows, self.slots,
            self.training.learns, self.workdir,
        )  # fmt: skip

    @property
    def meshes(self) -> list[jax.sharding.Mesh]:
        """The run's mesh, and that of a tower on devices of its own."""
        return [self.mesh, *([self.tower.mesh] if self.tower else [])]

    def write_down(self, workdir: pathlib.Path) -> None:
        """Write the files that say what the run is; process 0 alone does."""
        if jax.process_index():
            return
        workdir.mkdir(parents=True, exist_ok=True)
        if self.tokenizer is not None and not (workdir / "tokenizer").is_dir():
            # Whole or not at all: a kill in the middle must not leave half a tokenizer.
            half = workdir / "tokenizer.tmp"
            shutil.rmtree(half, ignore_errors=True)
            self.tokenizer.save(half)
            half.rename(workdir / "tokenizer")
        if self.source is not None:
            exporting.keep(self.source, workdir)
        for tower, source in (self.dual.towers if self.dual else {}).items():
            exporting.keep(source, workdir / tower)
        kind, size = self.mesh.devices.flat[0].device_kind, sum(mesh.size for mesh in self.meshes)
        record.write_config(workdir, self.config, f"{size} x {kind}")


def _say(line: str) -> None:
    if not jax.process_index():
        print(line, flush=True)


def _listed(refused: dict[int, str]) -> str:
    """Each reason once, numbers apart, with the devices of the tower that it was for."""
    like: dict[str, list[int]] = {}
    for count, why in refused.items():
        like.setdefault(re.sub(r"\d+", "", why), []).append(count)
    return "; ".join(
        f"with {', '.join(map(str, counts))}: {refused[counts[0]]}" for counts in like.values()
    )


def _check(config: TrainConfig) -> None:
    """Refuse what no other part looks at before the first checkpoint."""
    check_name(config)
    if not config.data.train:
        raise ConfigError(
            "config.data.train names no data: a FILE.json, a FILE.jsonl, or easy-vqa:train"
        )
    keep, mode = config.checkpoint.keep, config.checkpoint.mode
    if keep < 1:
        raise ConfigError(f"config.checkpoint.keep={keep}: at least 1 must be kept")
    if mode not in ("max", "min"):
        raise ConfigError(f"config.checkpoint.mode={mode!r}; known: max, min")
    _check_ranges(config)
    if config.eval_every and not config.data.eval:
        raise ConfigError(
            f"config.eval_every={config.eval_every}, but config.data.eval names no data"
        )
    if config.early_stop and not config.eval_every:
        raise ConfigError(
            f"config.early_stop={config.early_stop} needs evaluations on the way: set "
            "config.data.eval and config.eval_every"
        )
    if config.wandb_project and importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            f"config.wandb_project={config.wandb_project!r}, but wandb is not installed: "
            "pip install 'jaxvlm[wandb]', or leave it empty"
        )


def _check_rows(config: TrainConfig) -> None:
    """Refuse row lengths that the mesh does not divide."""
    parts, data = config.mesh.context, config.data
    parts *= config.mesh.tensor if config.strategy.sequence else 1
    count = 1 if data.packing else data.buckets
    near = parts if count == 1 else 8 * parts
    for length in packing.buckets(data.max_length, count):
        if length % parts:
            raise ConfigError(
                f"config.mesh.context (with config.strategy.sequence times tensor) = {parts} does "
                f"not divide rows of {length} tokens "
                f"(config.data.max_length={data.max_length}); take a multiple of {near}"
            )


def _check_ranges(config: TrainConfig) -> None:
    """Refuse numbers that have no meaning."""
    optim, data = config.optim, config.data
    bounds = {
        "optim.learning_rate": (optim.learning_rate, 0, math.inf),
        "optim.warmup_steps": (optim.warmup_steps, 0, math.inf),
        "optim.b1": (optim.b1, 0, 0.9999999),
        "optim.b2": (optim.b2, 0, 0.9999999),
        "optim.weight_decay": (optim.weight_decay, 0, math.inf),
        "optim.clip_norm": (optim.clip_norm, 0, math.inf),
        "data.workers": (data.workers, 1, math.inf),
        "data.prefetch": (data.prefetch, 1, math.inf),
        "data.max_images": (data.max_images, 1, math.inf),
        "data.max_patches": (data.max_patches, 0, math.inf),
        "data.picture_pixels": (min(data.picture_pixels), 0, math.inf),
        "data.max_skip_share": (data.max_skip_share, 0, 1),
        "log_every": (config.log_every, 1, math.inf),
        "loss_chunk": (config.loss_chunk, 0, math.inf),
        "max_bad_steps": (config.max_bad_steps, 1, math.inf),
        "checkpoint.every": (config.checkpoint.every, 0, math.inf),
    }
    for name, (value, least, most) in bounds.items():
        if not least <= value <= most:
            span = f"at least {least}" if most == math.inf else f"between {least} and {most}"
            raise ConfigError(f"config.{name}={value}: it must be {span}")
