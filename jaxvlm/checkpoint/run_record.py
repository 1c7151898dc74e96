"""The record of a run: ``config.json`` with its settings, versions, commit and devices.

Its files, and others that must not be seen in part, are written whole or not at all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import glob
import hashlib
import json
import logging
import os
import pathlib
import platform
import subprocess
import uuid
from collections.abc import Collection, Iterator
from importlib import metadata
from typing import Any, BinaryIO

from jaxvlm.config import (
    Config,
    ConfigError,
    DualConfig,
    ModelConfig,
    from_config_dict,
    json_text,
)
from jaxvlm.config.merge import RECIPE_FIELDS

_PACKAGES = ("jaxvlm", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
_FILE = "config.json"
_NUMERIC = {
    "jax_default_matmul_precision": None,
    "jax_default_prng_impl": "threefry2x32",
    "jax_random_seed_offset": 0,
    "jax_threefry_partitionable": True,
}
"""JAX's settings that change results, and their defaults."""
_NUMERIC_VARIABLES = (
    *("JAX_ALLOW_F16_REDUCTIONS", "JAX_DEFAULT_DTYPE_BITS", "JAX_DISABLE_JIT", "JAX_REMAT3"),
    *("JAX_DISABLE_MOST_OPTIMIZATIONS", "JAX_ENABLE_CUSTOM_PRNG", "JAX_SCAN3"),
    *("JAX_EXEC_TIME_OPTIMIZATION_EFFORT", "JAX_HIGH_DYNAMIC_RANGE_GUMBEL"),
    *("JAX_OPTIMIZATION_LEVEL", "JAX_SOFTMAX_CUSTOM_JVP", "JAX_THREEFRY_GPU_KERNEL_LOWERING"),
    *("JAX_USE_DIRECT_LINEARIZE", "JAX_USE_SHARDY_PARTITIONER"),
)
"""Variables of others, whose defaults differ between versions of JAX."""
_HARMLESS_FLAGS = ("--xla_force_host_platform_device_count", "--xla_dump", "--xla_cpu_collective_")
"""Flags of XLA that change no result."""
_log = logging.getLogger(__name__)


def local_folder(setting: str, folder: str | os.PathLike[str]) -> None:
    """Refuses a URL where a local folder is wanted, since it would create a folder of that name.

    Raises:
        ConfigError: ``folder`` is a URL such as ``gs://bucket/run``.
    """
    if "://" in str(folder):
        raise ConfigError(
            f"{setting}={folder}: object stores are not supported yet; mount the bucket "
            "(gcsfuse, a PersistentVolume) and pass the mounted folder"
        )


@contextlib.contextmanager
def locked(workdir: pathlib.Path) -> Iterator[None]:
    """Locks ``workdir`` so that no other run writes to it at the same time.

    Raises:
        ConfigError: another run holds the lock, or something in the folder is a link out of it.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    _refuse_links(workdir)
    path = workdir / ".lock"
    try:  # never truncated: the file may be another's
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if path.is_symlink():
            raise ConfigError(f"{path} is a symbolic link; remove it") from None
        raise ConfigError(f"{path} can't be opened: {error.strerror}") from None
    with os.fdopen(lock, "r+b", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"--workdir={workdir}: another run is writing to it; wait until that run ends, or "
                "choose another folder"
            ) from None
        except OSError:
            pass  # a file system without locks
        yield


def _refuse_links(workdir: pathlib.Path) -> None:
    """Refuse what would lead a run's files elsewhere, or block it: links out, pipes and devices.

    Two levels are looked at. Names that a run writes to are fixed there; below, they are new ones.

    Raises:
        ConfigError: there is one; the message names it.
    """
    root = os.path.realpath(workdir)
    entries = list(os.scandir(workdir))
    for entry in list(entries):
        if entry.is_dir(follow_symlinks=False):
            entries += os.scandir(entry)
    for entry in entries:
        if entry.is_symlink():
            target = os.path.realpath(entry)
            if os.path.commonpath([root, target]) != root:
                raise ConfigError(
                    f"{entry.path} is a symbolic link to {target}, outside of the run's folder, "
                    "and nothing is written through it; remove it, or name a --workdir there"
                )
        elif not (entry.is_file() or entry.is_dir()) and os.path.lexists(entry):
            raise ConfigError(f"{entry.path} is a pipe, a socket or a device; remove it")


def write_config(
    workdir: pathlib.Path, config: Config, devices: str, trains_embeddings: bool | None = None
) -> None:
    """Writes ``config.json`` with settings, versions, commit and devices.

    Args:
        workdir: folder of the run.
        config: its settings.
        devices: what it runs on.
        trains_embeddings: whether a loss of the user's own does, so that no one has to import it
            to use the model; ``None``: not known.
    """
    own = {} if trains_embeddings is None else {"trains_embeddings": trains_embeddings}
    document = {
        "config": dataclasses.asdict(config),
        "folder": os.getcwd(),  # which the settings' relative paths are relative to
        **own,
        "versions": _versions(),
        "commit": source_commit(),
        "devices": devices,
        "numeric_settings": numeric_settings(),
    }
    write_whole(workdir / _FILE, json.dumps(document, indent=2) + "\n")


def has_checkpoint(workdir: pathlib.Path) -> bool:
    """Whether a step of the run was saved; its folder alone is there from the first start on."""
    return any(path.name.isdigit() for path in (workdir / "checkpoints").glob("*"))


def is_begun(workdir: str | pathlib.Path) -> bool:
    """Whether a folder holds a ``config.json``, as that of a run does."""
    return (pathlib.Path(workdir) / _FILE).is_file()


def read_config(workdir: str | pathlib.Path) -> Config:
    """Reads the settings of the run in ``workdir``.

    Raises:
        ConfigError: ``workdir`` holds no run, or its ``config.json`` is damaged.
    """
    path = pathlib.Path(workdir) / _FILE
    if not path.is_file():
        advice = ""
        if path.with_name("adapter_config.json").is_file():
            advice = (
                "; it is a PEFT adapter: pass its base model as --checkpoint and this folder as "
                "--adapter"
            )
        if path.with_name("router_config.json").is_file():
            advice = (
                "; it is a Router of sentence-transformers: pass the run that it was exported from"
            )
        raise ConfigError(f"{workdir} holds no run: it has no {_FILE}{advice}")
    try:
        document = json_text.read(path)
        if not isinstance(document["config"], dict):
            raise TypeError("its settings are no object")
        config = _with_unquantized_base(from_config_dict(document["config"]))
        if "trains_embeddings" in document:
            loss = config.loss.recorded(bool(document["trains_embeddings"]))
            config = dataclasses.replace(config, loss=loss)
        return config
    except ConfigError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is damaged: {error}") from None


def _with_unquantized_base(config: Config) -> Config:
    """Settings of a run with ``lora.base`` as it is called today where nothing is quantized."""
    for name in ("model", "dual"):
        network = getattr(config, name)
        if network.lora.base == "float32":
            lora = dataclasses.replace(network.lora, base="")
            network = dataclasses.replace(network, lora=lora)
            config = dataclasses.replace(config, **{name: network})
    return config


def read_config_to_use(workdir: str | pathlib.Path) -> Config:
    """Reads the settings of the run in ``workdir``, for use in any folder.

    A file of ``data.train``, ``data.eval`` or ``data.image_root`` that is not where its relative
    path leads from the current folder is taken from the folder in which the run was started.

    Raises:
        ConfigError: as for :func:`read_config`.
    """
    config = read_config(workdir)
    data = config.data
    document = json_text.read(pathlib.Path(workdir) / _FILE)
    if not isinstance(start := document.get("folder"), str) or start == os.getcwd():
        return config
    changed: dict[str, Any] = {}
    for name in ("train", "eval", "image_root"):
        path = pathlib.Path(getattr(data, name)).expanduser()
        if not getattr(data, name) or path.is_absolute() or _is_found(path):
            continue
        there = pathlib.Path(start) / path
        if _is_found(there):
            changed[name] = str(there)
        elif path.suffix and not data.format.target:  # a file, not a name such as easy-vqa:test
            _log.warning(
                "config.data.%s=%s is neither in this folder nor in %s, where the run was started",
                name,
                path,
                start,
            )
    return dataclasses.replace(config, data=dataclasses.replace(data, **changed))


def _is_found(path: pathlib.Path) -> bool:
    return bool(glob.glob(glob.escape(str(path)))) or bool(glob.glob(str(path)))


def changed_settings(workdir: pathlib.Path, config: Config) -> list[str]:
    """Lists settings and versions that differ from the last start's of the run in ``workdir``.

    Raises:
        ConfigError: a setting of JAX that changes results is another one; XLA's flags, which go
            with a kind of device, are only listed.
    """
    try:
        old = read_config(workdir)
    except ConfigError as error:  # the file is about to be rewritten
        return [str(error)]
    lines = [f"changed since this run began: {line}" for line in changes(old, config)]
    document = json_text.read(workdir / _FILE)
    versions = _versions()
    lines += [
        f"version of {name} since the last start: {was} -> {versions.get(name)}; bits may differ"
        for name, was in sorted(_object(document, "versions").items())
        if was != versions.get(name)
    ]
    before = _object(document, "numeric_settings")
    now = numeric_settings()
    for name in sorted(before.keys() | now.keys()):
        if (was := before.get(name, "")) != (value := now.get(name, "")):
            line = f"{name} was {was or 'not set'} when this run began, and is {value or 'not set'}"
            if name.startswith("JAX_"):
                raise ConfigError(f"{workdir}: {line}; it changes results, so set it as it was")
            lines.append(line)
    return lines


def _object(document: dict[str, Any], name: str) -> dict[str, Any]:
    """An object of a ``config.json``; {} where an older jaxvlm wrote none, or it is damaged."""
    value = document.get(name)
    return value if isinstance(value, dict) else {}


def numeric_settings() -> dict[str, str]:
    """Return the settings of JAX and XLA that change results and are not the defaults.

    They come from variables (``JAX_DEFAULT_PRNG_IMPL``, ``XLA_FLAGS``, ``LIBTPU_INIT_ARGS``) or
    from ``jax.config.update``.

    Returns:
        Name of the variable -> its value; of flags, those that may change a result, sorted.
    """
    import jax  # which `jaxvlm cache` does without

    found = {
        name.upper(): str(jax.config.values[name])
        for name, default in _NUMERIC.items()
        if jax.config.values.get(name, default) != default
    }
    found |= {name: os.environ[name] for name in _NUMERIC_VARIABLES if name in os.environ}
    for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"):
        flags = os.environ.get(name, "").split()
        if kept := sorted(flag for flag in flags if not flag.startswith(_HARMLESS_FLAGS)):
            found[name] = " ".join(kept)
    return found


def code_digest() -> str:
    """Hash of jaxvlm's source files, by which processes find that they run different code."""
    digest = hashlib.blake2b(digest_size=8)
    root = pathlib.Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()


def program() -> dict[str, Any]:
    """What computes: versions, commit, source and settings that change results; JSON-able."""
    return {
        "versions": _versions(),
        "source files": code_digest(),
        "commit": source_commit(),
        "settings of JAX and XLA": numeric_settings(),
    }


def check_same_model(workdir: str, config: Config) -> ModelConfig | DualConfig:
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
    source = read_config(workdir)
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


def check_resumed_model(workdir: pathlib.Path, config: Config) -> None:
    """Refuses to go on with the checkpoint of another model whose arrays have the same shapes.

    Raises:
        ConfigError: ``config`` describes another model than the workdir's ``config.json``.
    """
    try:
        differ, _ = _model_changes(read_config(workdir), config)
    except ConfigError:  # no settings are left to compare with, which changed_settings says
        return
    if differ:
        raise ConfigError(
            f"{workdir}: the model changed since the checkpoint: {'; '.join(differ[:5])}; restore "
            "the old values, or start a new workdir"
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


def by_path(config: Any, path: str = "config") -> dict[str, Any]:
    """Maps each setting's path to its value."""
    if not dataclasses.is_dataclass(config):
        return {path: config}
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        found |= by_path(getattr(config, field.name), f"{path}.{field.name}")
    return found


def changes(old: Any, new: Any, path: str = "config") -> list[str]:
    """Lists the settings that differ between two configs, as ``path: old -> new``."""
    if not dataclasses.is_dataclass(old):
        return [] if old == new else [f"{path}: {old!r} -> {new!r}"]
    names = [field.name for field in dataclasses.fields(old)]
    differing = (changes(getattr(old, n), getattr(new, n), f"{path}.{n}") for n in names)
    return [line for lines in differing for line in lines]


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def source_commit() -> str:
    """The source tree's commit, with ``+changes`` if its code differs; "" outside a checkout."""
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


@contextlib.contextmanager
def whole_file(path: pathlib.Path) -> Iterator[BinaryIO]:
    """Open a file for writing that is never seen in part; it replaces an older one at the end.

    Raises:
        OSError: it can't be written; then an older file is unchanged.
    """
    temporary = path.with_name(f"{uuid.uuid4().hex}.tmp")
    try:
        # Open for reading too: NumPy writes another kind of file by itself, and then does not say
        # what the system said of a full disk.
        with open(temporary, "x+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and error.filename in (None, str(temporary)):
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise
    with contextlib.suppress(OSError):  # some file systems can't sync folders
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_whole(path: pathlib.Path, data: bytes | str) -> None:
    """Write a file as :func:`whole_file` does; text becomes UTF-8."""
    with whole_file(path) as file:
        file.write(data.encode() if isinstance(data, str) else data)
