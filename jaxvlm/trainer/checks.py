"""Settings that are refused before a run reads a file, and those left to the planner."""

from __future__ import annotations

import dataclasses
import importlib.util
import pathlib
from collections.abc import Sequence
from typing import Any

from jaxvlm.checkpoint.run_record import is_url
from jaxvlm.config import (
    Config,
    ConfigError,
    check_choice,
    check_mixture,
    formats_of,
    from_config_dict,
    refuse_changed,
    refuse_unread,
    refuse_unread_by,
)
from jaxvlm.data.conversations import packing
from jaxvlm.data.conversations.content import is_packed, packed_data
from jaxvlm.data.conversations.mixture_records import SOURCE_SETTINGS
from jaxvlm.data.packed.checks import OF_READING
from jaxvlm.data.sources.member_names import is_remote
from jaxvlm.losses.registry import check_loss_name, loss_setting, trains_embeddings
from jaxvlm.spmd.gradcache import AUTO_MINI_BATCH
from jaxvlm.stores.object_store import check_scheme
from jaxvlm.train import island_checks
from jaxvlm.train.callbacks import Callback

AUTO = "auto"


def checked(config: Any, workdir: str | pathlib.Path, callbacks: Sequence[Callback] = ()) -> Config:
    """The settings of a run, with the metric that names its best checkpoint.

    Args:
        config: a Config, or a ConfigDict with the same keys.
        workdir: the run's folder, or "".
        callbacks: of the run.

    Raises:
        ConfigError: settings that no run can use.
    """
    config = from_config_dict(config)
    if config.federate.sites and not any(callback.is_federated for callback in callbacks):
        raise ConfigError(
            f"config.federate.sites={config.federate.sites}: this is the recipe of a federation; "
            "`jaxvlm federate` trains it, or leave config.federate out"
        )
    default = "recall@1" if trains_embeddings(config) else "exact_match"
    metric = config.checkpoint.metric or default
    # A run's record names the default too, without evaluation data as well.
    _check_config(_with_metric(config, "" if metric == default else metric))
    for setting, folder in (("--workdir", workdir), ("config.init_from", config.init_from)):
        if is_url(folder):
            check_scheme(setting, str(folder))
    return _with_metric(config, metric)


def _with_metric(config: Config, metric: str) -> Config:
    checkpoint = dataclasses.replace(config.checkpoint, metric=metric)
    return dataclasses.replace(config, checkpoint=checkpoint)


def _check_config(config: Config) -> None:
    """Refuse what no other part looks at before the first checkpoint."""
    check_loss_name(config)
    check_data(config)
    _check_trains_tokens(config)
    check_choice("config.checkpoint.mode", config.checkpoint.mode, ("max", "min"))
    refuse_unread(config, "config")
    refuse_unread(config.outer, "config.outer")
    if config.mesh.island != 1:
        island_checks.check(config)
    refuse_unread(config.federate, "config.federate")
    if config.wandb_project and importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            f"config.wandb_project={config.wandb_project!r}, but wandb is not installed: "
            "pip install 'jaxvlm[wandb]', or leave it empty"
        )


def check_packable(config: Config) -> None:
    """Refuse data that `jaxvlm data pack` can't pack.

    Raises:
        ConfigError: which, and what to do.
    """
    check_data(config)
    packed, mixture = packed_data(config.data), config.data.mixture
    if packed and len(packed) >= len(mixture):
        what = "config.data.mixture" if mixture else f"config.data.train={packed[0]!r}"
        raise ConfigError(f"{what} is packed already")


def check_image_root(setting: str, root: str) -> None:
    """Refuse a place of images that is neither a folder nor one in a bucket.

    Args:
        setting: its name, for messages.
        root: its value; "" is none.

    Raises:
        ConfigError: it is neither, or the package for the store is missing.
    """
    if is_remote(root):
        check_scheme(setting, root, root=True)
    elif root and not pathlib.Path(root).expanduser().is_dir():
        raise ConfigError(f"{setting}={root!r}: no such folder")


def check_data(config: Config) -> None:
    """Refuse data that are not named, named twice, or have settings that nothing reads."""
    data, mixture = config.data, config.data.mixture
    if not (data.train or mixture):
        raise ConfigError(
            "config.data.train names no data: a FILE.json, a FILE.jsonl, or easy-vqa:train"
        )
    if data.train and mixture:
        raise ConfigError(
            f"config.data.train={data.train!r} and config.data.mixture both name training data; "
            "leave one out"
        )
    if mixture and trains_embeddings(config):
        raise ConfigError(
            f"config.data.mixture is not read by {loss_setting(config)}, which trains embeddings; "
            "put the files of a mixture under one pattern in config.data.train, with a task each, "
            "and set config.data.pairs.tasks and task_alpha"
        )
    if mixture:
        check_mixture(mixture, "config.data.mixture")
    budgets = [name for name, source in mixture.items() if source.budget]
    if budgets and config.steps:
        raise ConfigError(
            f"config.steps={config.steps}: config.data.mixture.{budgets[0]}."
            f"{mixture[budgets[0]].budget} says how much of it one epoch of the mixture has; set "
            "config.epochs=1 and config.steps=0, or give the sources weights"
        )
    if mixture:
        refuse_unread(data, "config.data")
    if is_packed(data.eval, data):
        what = "is at a URL of a packed set" if is_remote(data.eval) else "is packed"
        raise ConfigError(
            f"config.data.eval={data.eval!r} {what}, which only training data can be; name a file "
            "of records on this machine"
        )
    if mixture and len(packed_data(data)) == len(mixture) and not data.eval:
        refuse_changed(data, OF_READING, "config.data", "by a mixture of packed sets")
    specs = [data.train, data.eval, *(source.train for source in mixture.values())]
    refuse_unread_by(data, formats_of(data, *specs))
    groups: dict[str, Any] = {"config.data": data}
    for name, source in mixture.items():
        groups[f"config.data.mixture.{name}"] = source
        if is_packed(source.train, data):
            unread, why = (*SOURCE_SETTINGS, "max_records"), f"by {source.train}, which is packed"
            refuse_changed(source, unread, f"config.data.mixture.{name}", why)
            continue
        kinds = formats_of(data, source.train)
        refuse_unread_by(source, kinds, SOURCE_SETTINGS, f"config.data.mixture.{name}")
    for path, group in groups.items():
        check_image_root(f"{path}.image_root", group.image_root)
    if data.fetched and not pathlib.Path(data.fetched).expanduser().is_dir():
        raise ConfigError(
            f"config.data.fetched={data.fetched!r}: no such folder; `jaxvlm data fetch` makes it"
        )


def _check_trains_tokens(config: Config) -> None:
    """Refuse settings that are not read where the loss is over tokens."""
    if trains_embeddings(config):
        return
    why = (
        f"by {loss_setting(config)}, which trains tokens, not embeddings (a loss of pairs, such as "
        "config.loss.name=info_nce, does)"
    )
    names = ("embedder", "dual", "embedding", "grad_cache")
    refuse_changed(config, names, "config", why)
    refuse_unread(config.data, "config.data")


def unprofiled(config: Config, steps: int, start: int = 0) -> str:
    """Say that a run's profiler traces none of its steps; "" where it traces some, or is off.

    Args:
        config: of the run.
        steps: of the whole run.
        start: steps taken before.
    """
    first, end = config.profile_steps
    if not (first or end) or range(max(first, start + 1), min(end, steps + 1)):
        return ""
    return (
        f"config.profile_steps=({first}, {end}) traces no step: steps {start + 1} to {steps} are "
        "taken, and the second number's is not traced"
    )


def check_lengths(config: Config) -> None:
    """Refuse row lengths that the mesh does not divide."""
    parts, data = config.mesh.context, config.data
    parts *= config.mesh.tensor if config.strategy.sequence_parallel else 1
    count = 1 if data.packing else data.buckets
    near = parts if count == 1 else 8 * parts
    for length in packing.buckets(data.max_length, count):
        if length % parts:
            raise ConfigError(
                "config.mesh.context (with config.strategy.sequence_parallel times tensor) = "
                f"{parts} does "
                f"not divide rows of {length} tokens "
                f"(config.data.max_length={data.max_length}); take a multiple of {near}"
            )


def check_loss(config: Config, model: Any, dataset: Any, rows: Any) -> None:
    """Refuse a loss of the user's own that does not add up.

    Args:
        config: of the run.
        model: on its mesh.
        dataset: that the run trains on.
        rows: rows of the global batch that this process holds.

    Raises:
        ConfigError: see :func:`jaxvlm.trainer.loss_check.check`.
    """
    if config.loss.target:
        from jaxvlm.trainer import loss_check

        loss_check.check(config, model, dataset, rows)


def auto_settings(config: Config) -> list[str]:
    """Names of the settings that a recipe leaves to the planner; needs no planner itself."""
    is_auto = {
        "strategy.name": config.strategy.name == AUTO,
        "mesh.data": config.mesh.data == 0,
        "model.vision.remat": config.model.vision.remat == AUTO,
        "model.decoder.remat": config.model.decoder.remat == AUTO,
        "dual.vision.remat": config.dual.vision.remat == AUTO,
        "dual.text.remat": config.dual.text.remat == AUTO,
        "microbatches": config.microbatches == 0,
        "grad_cache.query_mini_batch": config.grad_cache.query_mini_batch == AUTO_MINI_BATCH,
        # Refused by the planner, which knows one mesh only.
        "encoder.strategy.name": config.encoder.strategy.name == AUTO,
    }
    return [name for name, auto in is_auto.items() if auto]
