"""What a run writes down about itself: ``config.json``."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
import platform
import subprocess
from collections.abc import Collection, Iterator
from importlib import metadata
from typing import Any

from jaxvlm.build.merge import OURS
from jaxvlm.config import ConfigError, DualConfig, ModelConfig, TrainConfig, from_config_dict

_PACKAGES = ("jaxvlm", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
_FILE = "config.json"


def local_folder(what: str, folder: str | os.PathLike[str]) -> None:
    """Refuse an address where a folder is wanted: it would become a local folder of that name.

    Raises:
        ConfigError: ``folder`` is a URL such as ``gs://bucket/run``.
    """
    if "://" in str(folder):
        raise ConfigError(
            f"{what}={folder}: object stores are not read or written yet; mount the bucket "
            "(gcsfuse, a PersistentVolume) and give its folder"
        )


@contextlib.contextmanager
def locked(workdir: pathlib.Path) -> Iterator[None]:
    """Keep other runs out of ``workdir`` while this one writes there.

    Raises:
        ConfigError: another run is at work in it.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    with (workdir / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"--workdir={workdir}: another run is writing there; wait for it, or choose "
                "another folder"
            ) from None
        except OSError:
            pass  # a file system without locks
        yield


def write_config(workdir: pathlib.Path, config: TrainConfig, devices: str) -> None:
    """Write ``config.json``: settings, versions, commit, devices."""
    document = {
        "config": dataclasses.asdict(config),
        "versions": _versions(),
        "commit": source_commit(),
        "devices": devices,
    }
    text = json.dumps(document, indent=2) + "\n"
    # A kill in the middle of writing must leave the old file, or the new one.
    half = workdir / f"{_FILE}.tmp"
    half.write_text(text, encoding="utf-8")
    os.replace(half, workdir / _FILE)


def is_begun(workdir: str | pathlib.Path) -> bool:
    """Whether a folder holds a run, or some other thing with such a file."""
    return (pathlib.Path(workdir) / _FILE).is_file()


def read_config(workdir: str | pathlib.Path) -> TrainConfig:
    """The settings of the run in ``workdir``.

    Raises:
        ConfigError: there is no run, or its file can't be read.
    """
    path = pathlib.Path(workdir) / _FILE
    if not path.is_file():
        advice = ""
        if path.with_name("adapter_config.json").is_file():
            advice = "; it is a PEFT adapter: --checkpoint is its base, --adapter this folder"
        if path.with_name("router_config.json").is_file():
            advice = "; it is a Router of sentence-transformers: name the run that it is of"
        raise ConfigError(f"{workdir} holds no run: it has no {_FILE}{advice}")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        return from_config_dict(document["config"])
    except (KeyError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path} is damaged: {error}") from None


def changed_settings(workdir: pathlib.Path, config: TrainConfig) -> list[str]:
    """Lines that say which settings differ from those the run in ``workdir`` was last given."""
    try:
        old = read_config(workdir)
    except ConfigError as error:  # it is about to be written anew
        return [str(error)]
    return [f"changed since this run began: {line}" for line in changes(old, config)]


def check_same_model(workdir: str, config: TrainConfig) -> ModelConfig | DualConfig:
    """Refuse weights of a model that computes another thing with arrays of the same shapes.

    Args:
        workdir: of the run that the weights are of.
        config: of the run that starts from them.

    Returns:
        The model in ``workdir``: as that of ``config``, but it may be without adapters where that
        has some.

    Raises:
        ConfigError: the settings that differ.
    """
    found, model = read_config(workdir), config.network
    old, lora = found.network, found.network.lora
    if type(old) is not type(model) or found.vectors != config.vectors:
        raise ConfigError(
            f"config.init_from={workdir} holds weights of another kind of model: "
            f"{'; '.join(changes(found, config)[:5])}"
        )
    old = dataclasses.replace(old, lora=lora if lora.rank else model.lora)
    # A vocabulary's size is filled in later, and is checked by the arrays' shapes.
    words = "decoder" if isinstance(model, ModelConfig) else "text"
    size = getattr(model, words).vocab_size
    tower = dataclasses.replace(getattr(old, words), vocab_size=size)
    old = dataclasses.replace(old, **{words: tower})
    # How it is computed, and where it is from, not what it is.
    free = {*OURS, "attention", "dtype", "checkpoint", "vision_checkpoint", "text_checkpoint"}
    free -= {"trunk"} if lora.rank else set()  # where a tower's stack of blocks is cut in two
    where = "config.model" if isinstance(model, ModelConfig) else "config.dual"
    differ = [line for line in changes(old, model, where) if not _is_one_of(line, free)]
    if differ:
        raise ConfigError(
            f"config.init_from={workdir} holds weights of another model: {'; '.join(differ)}; "
            "use its settings"
        )
    return dataclasses.replace(old, lora=lora)


def _is_one_of(line: str, names: Collection[str]) -> bool:
    return line.split(":")[0].rsplit(".", 1)[-1] in names


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


def source_commit() -> str:
    """The source tree's commit, with a mark if its code differs from it; "" outside a checkout."""
    root = pathlib.Path(__file__).resolve().parents[2]
    git = ["git", "-C", str(root)]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
        dirty = subprocess.run(
            [*git, "status", "--porcelain", "--", "*.py"], capture_output=True, text=True
        )
    except OSError:
        return ""
    if commit.returncode:
        return ""
    return commit.stdout.strip() + ("+changes" if dirty.stdout.strip() else "")
