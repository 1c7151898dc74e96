"""A run's checkpoints: the state it starts from, saving, and the end where the machine is taken."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Collection
from typing import Any

from jaxvlm.cache.host_cache import HOST_CACHE
from jaxvlm.checkpoint import run_folder, run_record
from jaxvlm.checkpoint.checkpointer import Checkpointer, restore_params
from jaxvlm.config import Config, ConfigError, DualConfig, ModelConfig, changes
from jaxvlm.config.merge import RECIPE_FIELDS
from jaxvlm.data.prefetch import resume_step
from jaxvlm.data.tokenizer import chat_tokenizer
from jaxvlm.hf import peft_folder
from jaxvlm.models import frozen_blocks
from jaxvlm.parallel.distributed import processes
from jaxvlm.train.callbacks import Callback, CheckpointRecord
from jaxvlm.trainer.run import Run
from jaxvlm.trainer.training import Training
from jaxvlm.types import Params, TrainState


def restore_or_init(
    run: Run, checkpointer: Checkpointer, log: Callable[[str], None]
) -> tuple[TrainState, int, dict[str, Any]]:
    """The state to go on from.

    Args:
        run: built.
        checkpointer: of its workdir.
        log: prints a line.

    Returns:
        The state, how many steps it has taken, and what was saved with it.
    """
    training = run.training
    assert run.workdir is not None
    check_islands(run.workdir, run.config)
    restored = checkpointer.restore(training.checkpointed(training.abstract))
    if restored is not None:
        check_resumed_model(run.workdir, run.config)
        start = resume_step(restored.extra["data"], run.dataset.fingerprint())
        log(f"resuming at step {start} of {run.steps}")
        return training.with_empty_cache(restored.state), start, restored.extra
    return training.init(_first_params(run, log)), 0, {}


def _first_params(run: Run, log: Callable[[str], None]) -> Params:
    """The parameters of a run that has no checkpoint yet."""
    seed = run.config.seed
    if run.config.init_from:
        return _params_of_run(run, log)
    if run.dual is not None and (run.dual.towers or run.dual.of_run):
        params = run.dual.read_params(run.model, seed)
        if run.dual.of_run:
            log(f"weights of vision from {run.dual.of_run}")
        for tower, source in run.dual.towers.items():
            log(f"weights of {tower} from {source.weights}")
        return params
    if run.source is not None:
        params = peft_folder.read_params(run.source, run.model, seed)
        log(f"weights from {run.source.weights}")
        if run.config.network.lora.checkpoint:
            log(peft_folder.origin(run.config.network.lora))
        return params
    return run.model.init(seed)


def _params_of_run(run: Run, log: Callable[[str], None]) -> Params:
    """The weights of ``config.init_from``, whose vision encoder may be cut at another block."""
    config, model = run.config, run.model
    begun = run_folder.local_to_read(config.init_from, "config.init_from")
    folder = run_record.checkpoints_of(begun)
    old = check_same_model(begun, config)
    _check_same_tokens(begun / "tokenizer", run.tokenizer)
    base, cut, old_cut = model.base(), config.network.vision.frozen_blocks, old.vision.frozen_blocks
    wanted = model.abstract() if old.lora.rank else frozen_blocks.shapes(base, old_cut)
    params = restore_params(folder, wanted, "latest", on_warning=log)
    if not old.lora.rank:
        params = params if cut == old_cut else frozen_blocks.onto(base, params, cut)
        params = model.with_adapters(model.stored(params), config.seed)
    log(f"weights from {config.init_from}")
    return params


def _check_same_tokens(saved: pathlib.Path, tokenizer: Any) -> None:
    """Refuse to start from weights whose tokens have other ids in this run, which may have more.

    Args:
        saved: tokenizer folder of the run that the weights come from.
        tokenizer: of this run; ``None`` where it reads no texts.
    """
    if tokenizer is None or not saved.is_dir():
        return
    theirs = chat_tokenizer.read(saved)[0].get_vocab(with_added_tokens=True)
    ours = tokenizer.backend.get_vocab(with_added_tokens=True)
    if moved := sorted(token for token, number in theirs.items() if ours.get(token) != number):
        raise ConfigError(
            f"config.init_from={saved.parent}: {len(moved)} of the {len(theirs)} tokens that its "
            f"weights belong to, such as {moved[0]!r}, have another id or none in this run's "
            f"tokenizer; use {saved}"
        )


def check_same_model(workdir: pathlib.Path, config: Config) -> ModelConfig | DualConfig:
    """Refuses weights of a different model whose arrays happen to have the same shapes.

    Args:
        workdir: folder of the run that the weights come from.
        config: settings of the run that starts from them.

    Returns:
        The model settings of ``workdir``: equal to those of ``config``, except that adapters may be
        missing where ``config`` has some.

    Raises:
        ConfigError: the models differ; the message lists the settings.
    """
    source = run_record.read_config(workdir)
    differ, old = _model_changes(source, config)
    if old is None:
        raise ConfigError(
            f"config.init_from={workdir} holds weights of another kind of model: "
            f"{'; '.join(differ)}"
        )
    if differ:
        raise ConfigError(
            f"config.init_from={workdir} holds weights of another model: {'; '.join(differ)}; "
            "use the settings of that run"
        )
    return dataclasses.replace(old, lora=source.network.lora)


def check_islands(workdir: pathlib.Path, config: Config) -> None:
    """Refuses to go on with another number of islands, each of which has a state of its own.

    Raises:
        ConfigError: names both numbers.
    """
    if not run_record.has_checkpoint(workdir):
        return
    try:
        before = run_record.read_config(workdir).mesh.island
    except ConfigError:  # the checkpoint's arrays decide
        return
    if before != config.mesh.island:
        raise ConfigError(
            f"{workdir}: config.mesh.island={config.mesh.island}, but its checkpoint is of a run "
            f"with {before}, and each island has a state of its own; set it to {before}, or start "
            "a new workdir with --config.init_from=OLD_WORKDIR from the shared weights"
        )


def check_resumed_model(workdir: pathlib.Path, config: Config) -> None:
    """Refuses to go on with the checkpoint of another model whose arrays have the same shapes.

    Raises:
        ConfigError: ``config`` describes another model, or another tokenizer, than the workdir's
            ``config.json``.
    """
    try:
        old = run_record.read_config(workdir)
        differ = _model_changes(old, config)[0]
        differ += changes(old.tokenizer, config.tokenizer, "config.tokenizer")
    except ConfigError:  # no settings are left to compare with, which changed_settings says
        return
    if differ:
        raise ConfigError(
            f"{workdir}: the model or its tokenizer changed since the checkpoint: "
            f"{'; '.join(differ[:5])}; restore the old values, or start a new workdir"
        )


def _model_changes(
    source: Config, config: Config
) -> tuple[list[str], ModelConfig | DualConfig | None]:
    """Lists how the model of ``config`` differs from that of ``source``.

    Returns:
        Settings as ``path: old -> new``; and the model of ``source`` with adapters as ``config``
        has them if it has none, or ``None`` if the models are of another kind.
    """
    model, old, lora = config.network, source.network, source.network.lora
    kind = changes(source.embedder, config.embedder, "config.embedder")
    kind += changes(source.embedding, config.embedding, "config.embedding")
    if kind:
        return kind, None
    old = dataclasses.replace(old, lora=lora if lora.rank else model.lora)
    # The vocabulary size is filled in later, and is checked by the arrays' shapes.
    text_model = "decoder" if isinstance(model, ModelConfig) else "text"
    size = getattr(model, text_model).vocab_size
    tower = dataclasses.replace(getattr(old, text_model), vocab_size=size)
    old = dataclasses.replace(old, **{text_model: tower})
    # Settings of how the model is computed and where its weights come from, not of what it is.
    ignored = {
        *RECIPE_FIELDS,
        "attention",
        "dtype",
        "checkpoint",
        "vision_checkpoint",
        "text_checkpoint",
        *("target", "options"),  # of a family: what reads the checkpoint
    }
    # With adapters, frozen_blocks must agree too: it splits a tower's stack of blocks in two.
    ignored -= {"frozen_blocks"} if lora.rank else set()
    path = "config.model" if isinstance(model, ModelConfig) else "config.dual"
    return [line for line in changes(old, model, path) if not _is_one_of(line, ignored)], old


def _is_one_of(line: str, names: Collection[str]) -> bool:
    return line.split(":")[0].rsplit(".", 1)[-1] in names


class CheckpointCallback(Callback):
    """Starts writing a checkpoint whenever one is due; steps go on meanwhile.

    Args:
        checkpointer: of the workdir.
        training: says what of the state is saved.
        extra: what was saved with the checkpoint that the run resumes from. What no callback adds
            of it is saved again: a run may resume for a while without evaluation data.
    """

    def __init__(self, checkpointer: Checkpointer, training: Training, extra: dict[str, Any]):
        self.checkpointer, self.training = checkpointer, training
        # Tokens in host memory are those of their own checkpoint alone.
        self.carried = {name: x for name, x in extra.items() if name != HOST_CACHE}

    def on_save(self, step: int, state: TrainState, record: CheckpointRecord) -> None:
        """Write the state with what the callbacks before this one added to ``record``."""
        record.extra = self.carried | record.extra
        record.written = self.checkpointer.save(
            step, self.training.checkpointed(state), record.extra, record.metrics
        )
        if record.is_awaited:
            self.checkpointer.wait()


class PreemptionCallback(Callback):
    """Stops every process after the same step once one of them got SIGTERM."""

    def should_stop(self, step: int) -> bool:
        """Whether SIGTERM came, to any process."""
        return processes.should_stop(step)
