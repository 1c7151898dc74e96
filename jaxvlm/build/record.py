"""What a run writes down about itself: ``config.json``."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import platform
import subprocess
from importlib import metadata
from typing import Any

from jaxvlm.config import ConfigError, TrainConfig, from_config_dict

_PACKAGES = ("jaxvlm", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
_FILE = "config.json"


def write_config(workdir: pathlib.Path, config: TrainConfig, devices: str) -> None:
    """Write ``config.json``: settings, versions, commit, devices."""
    document = {
        "config": dataclasses.asdict(config),
        "versions": _versions(),
        "commit": _commit(),
        "devices": devices,
    }
    text = json.dumps(document, indent=2) + "\n"
    (workdir / _FILE).write_text(text, encoding="utf-8")


def read_config(workdir: str | pathlib.Path) -> TrainConfig:
    """The settings of the run in ``workdir``.

    Raises:
        ConfigError: there is no run, or its file can't be read.
    """
    path = pathlib.Path(workdir) / _FILE
    if not path.is_file():
        raise ConfigError(f"{workdir} holds no run: it has no {_FILE}")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        return from_config_dict(document["config"])
    except (KeyError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path} is damaged: {error}") from None


def changes(old: Any, new: Any, path: str = "config") -> list[str]:
    """Settings that differ between two configs, as ``path: old -> new``."""
    if not dataclasses.is_dataclass(old):
        return [] if old == new else [f"{path}: {old!r} -> {new!r}"]
    names = [field.name for field in dataclasses.fields(old)]
    found = (changes(getattr(old, n), getattr(new, n), f"{path}.{n}") for n in names)
    return [line for lines in found for line in lines]


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _commit() -> str:
    """The source tree's commit, with a mark if files differ from it; "" outside a checkout."""
    root = pathlib.Path(__file__).resolve().parents[2]
    git = ["git", "-C", str(root)]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
        dirty = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True)
    except OSError:
        return ""
    if commit.returncode:
        return ""
    return commit.stdout.strip() + ("+changes" if dirty.stdout.strip() else "")
