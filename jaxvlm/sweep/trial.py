"""A trial: one run of a sweep, its id, and the record ``trial.json`` in its folder."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from jaxvlm.checkpoint import run_record
from jaxvlm.config import Config, ConfigError, by_path, json_text
from jaxvlm.sweep.definition import Row, as_text

RECORD = "trial.json"
LOG = "log.txt"
_SHOWN = 100  # characters of what a trial changes
_HOW = (
    *("mesh.data", "mesh.fsdp", "mesh.tensor", "mesh.context", "mesh.expert", "mesh.pipeline"),
    *("strategy.name", "data.workers", "data.prefetch", "log_every", "profile_steps"),
    *("memory_estimate", "compile_cache", "tensorboard", "wandb_project", "checkpoint.keep"),
    *("mlflow_experiment", "trackio_project", "prometheus_port"),
)
"""Settings that may change between the trials of a sweep: they say how a run is computed and
logged, and not what it trains."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """One run of a sweep."""

    folder: pathlib.Path
    """The run's folder, whose name is the trial's id."""
    factor: str
    """Name of the factor that an ablation changes; "" in other sweeps."""
    overrides: Mapping[str, str]
    """Path of a setting -> its value's text, of what differs between trials."""
    values: Mapping[str, Any]
    """Path of a setting -> its value, JSON-able."""
    settings: Mapping[str, Any]
    """Path -> value of every setting, as they were asked for; {} where they are not known."""

    @property
    def id(self) -> str:
        """The trial's name, of ten hexadecimal digits."""
        return self.folder.name

    @property
    def label(self) -> str:
        """The id, with what the trial changes; of a long list, the beginning."""
        changed = [f"{path}={as_text(value)}" for path, value in self.values.items()]
        text = ", ".join([*([self.factor] if self.factor else []), *changed])
        text = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
        return f"{self.id} ({text})" if text else self.id

    @property
    def step(self) -> int:
        """Step of the newest checkpoint; 0: there is none."""
        found = (self.folder / "checkpoints").glob("*")
        return max((int(path.name) for path in found if path.name.isdigit()), default=0)


def make_trial(workdir: pathlib.Path, row: Row, config: Config) -> Trial:
    """Make the trial of a row.

    Args:
        workdir: folder of the sweep.
        row: what is changed.
        config: the recipe's settings with the row's overrides.

    Raises:
        ConfigError: a path of the row is that of a group of settings.
    """
    values = {path: _plain(_value(config, path)) for path in row.overrides}
    for path, value in values.items():
        if isinstance(value, Mapping) or dataclasses.is_dataclass(value):
            raise ConfigError(f"{path} is a group of settings; vary its settings one by one")
    settings = {path.partition(".")[2]: _plain(x) for path, x in by_path(config).items()}
    return Trial(workdir / trial_id(values), row.factor, row.overrides, values, settings)


def trial_id(values: Mapping[str, Any]) -> str:
    """The id of a trial: a hash of what it changes, in whatever order and however it was written.

    Args:
        values: path of a setting -> its value, of the setting's type.
    """
    text = json.dumps(_plain(values), sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=5).hexdigest()


def refuse_duplicates(trials: list[Trial]) -> None:
    """Refuse trials with equal overrides, however these are written.

    Raises:
        ConfigError: names the first such trial.
    """
    seen: dict[str, Trial] = {}
    for trial in trials:
        if (other := seen.setdefault(trial.id, trial)) is not trial:
            twice = " and ".join(dict.fromkeys((other.label, trial.label)))
            raise ConfigError(f"the same trial is asked for twice: {twice}; leave one out")


def read_record(folder: pathlib.Path) -> dict[str, Any] | None:
    """Read a trial's record; ``None`` where the folder holds none.

    Raises:
        ConfigError: it is damaged.
    """
    path = folder / RECORD
    if not path.is_file():
        return None
    try:
        record = json_text.read(path)
        if not all(isinstance(record[name], dict) for name in ("overrides", "values", "settings")):
            raise TypeError("an object is missing")
        return dict(record)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path} is damaged: {error}; remove {folder} to train it again"
        ) from None


def of_record(folder: pathlib.Path, record: Mapping[str, Any]) -> Trial:
    """The trial that a folder's record describes."""
    fields = (record[name] for name in ("overrides", "values", "settings"))
    return Trial(folder, str(record.get("factor", "")), *fields)


def write_record(trial: Trial, **more: Any) -> None:
    """Write a trial's record, whole or not at all.

    Args:
        trial: of the record.
        **more: fields besides those of the trial; JSON-able.
    """
    record = {
        "factor": trial.factor,
        "overrides": dict(trial.overrides),
        "values": dict(trial.values),
        **more,
        "settings": dict(trial.settings),
    }
    text = json.dumps(record, indent=1)
    run_record.write_whole(trial.folder / RECORD, text + "\n")


def records_in(workdir: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Records of all trials in a sweep's folder, by id."""
    folders = sorted(path.parent for path in workdir.glob(f"*/{RECORD}"))
    found = {folder.name: read_record(folder) for folder in folders}
    return {name: record for name, record in found.items() if record is not None}


def changed_settings(trial: Trial, record: Mapping[str, Any]) -> list[str]:
    """List what a trial was trained with that is another value now.

    Args:
        trial: as it is asked for now.
        record: as it was started; a setting that one of them lacks is of another version.
    """
    old = record["settings"]
    return [
        f"config.{path}: {json.dumps(old[path])} -> {json.dumps(value)}"
        for path, value in trial.settings.items()
        if path in old and old[path] != value and path not in _HOW
    ]


def _value(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = config[name] if isinstance(config, Mapping) else getattr(config, name)
    return config


def _plain(value: Any) -> Any:
    """A setting's value with lists for tuples, as JSON gives it back."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
