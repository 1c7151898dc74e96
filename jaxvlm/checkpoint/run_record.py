"""The record of a run: ``config.json`` with its settings, versions, commit and devices.

Its files, and others that must not be seen in part, are written whole or not at all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from importlib import metadata
from typing import Any, BinaryIO

from jaxvlm.config import (
    Config,
    ConfigError,
    by_path,
    from_config_dict,
    json_text,
)

_PACKAGES = ("jaxvlm", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
CONFIG = "config.json"
CHECKPOINTS = "checkpoints"
"""Folder of a run's checkpoints in its own."""
COMMITTED = "commit_success.txt"
"""In an object store: file of a checkpoint that is complete."""
URL_FILE = ".url"
"""File of a local folder with the URL of the run's folder that it is a copy of."""
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
    *("JAX_USE_DIRECT_LINEARIZE", "JAX_USE_SHARDY_PARTITIONER", "JAX_PALLAS_USE_MOSAIC_GPU"),
    *("JAX_RAGGED_DOT_USE_GPU_PALLAS_TRITON_LOWERING", "JAX_RAGGED_DOT_USE_RAGGED_DOT_INSTRUCTION"),
    *("NVIDIA_TF32_OVERRIDE", "ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE"),
)
"""Variables of others, whose defaults differ between versions of JAX, and of the libraries that
compute matmuls."""
OF_DEVICES = (
    *("NCCL_ALGO", "NCCL_NVLS_ENABLE", "NCCL_PROTO", "CUBLAS_WORKSPACE_CONFIG"),
    *("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"),
)
"""Variables that change the order of sums, and go with a kind of device."""
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
SOURCES = ("init_from", "checkpoint", "vision_checkpoint", "text_checkpoint", "lora.init")
"""Ends of the names of settings that say where a run's first weights come from."""
_HARMLESS_FLAGS = ("--xla_force_host_platform_device_count", "--xla_dump", "--xla_cpu_collective_")
"""Flags of XLA that change no result."""


_SHARED = re.compile(
    r"fuse|nfs|cifs|smb|9p|lustre|ceph|beegfs|gpfs|glusterfs|afs|wekafs|pvfs2|orangefs|virtiofs"
)
"""Types of file systems that hosts share, as far as ``/proc/mounts`` tells."""


def is_url(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder is in an object store, as ``gs://bucket/run`` is.

    Raises:
        ConfigError: it looks like one that has lost a slash, as a path does.
    """
    if re.match(r"[a-z0-9]+:/(?!/)", str(folder)):
        given = "as text, not as a path" if isinstance(folder, pathlib.PurePath) else "with ://"
        raise ConfigError(f"{folder}: give the URL of an object store {given}")
    return "://" in str(folder)


def local_folder(setting: str, folder: str | os.PathLike[str]) -> None:
    """Refuses a URL where a local folder is wanted, since it would create a folder of that name.

    Raises:
        ConfigError: ``folder`` is a URL such as ``gs://bucket/run``.
    """
    if is_url(folder):
        raise ConfigError(
            f"{setting}={folder}: this can't be in an object store; mount the bucket (gcsfuse, a "
            "PersistentVolume) and pass the mounted folder"
        )


@contextlib.contextmanager
def locked(workdir: pathlib.Path) -> Iterator[bool]:
    """Lock ``workdir`` so that no other run of this host writes to it at the same time.

    Yields:
        Whether other hosts may write to it, so that it needs a ``run_lock.NumberedLock`` too.

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
        is_shared = _is_shared(workdir)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"--workdir={workdir}: another run is writing to it; wait until that run ends, or "
                "choose another folder"
            ) from None
        except OSError:
            is_shared = True  # a file system without locks
        yield is_shared


def _is_shared(folder: pathlib.Path) -> bool:
    """Whether a folder is on a file system that other hosts may write to, where that is known."""
    root, kind = "", ""
    with contextlib.suppress(OSError):
        real = os.path.realpath(folder)
        for line in pathlib.Path("/proc/mounts").read_text().splitlines():
            _, where, what, *_ = line.split()
            where = where.replace("\\040", " ")
            inside = os.path.commonpath([real, where]) == where
            if inside and len(where) >= len(root):
                root, kind = where, what
    return bool(_SHARED.search(kind))


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
        "versions": versions(),
        "code": code_of(config),
        "commit": source_commit(),
        "devices": devices,
        "numeric_settings": numeric_settings(),
    }
    write_whole(workdir / CONFIG, json.dumps(document, indent=2) + "\n")


def url_of(workdir: str | os.PathLike[str]) -> str:
    """The URL of the run's folder that a local folder is a copy of; "" if it is of none."""
    with contextlib.suppress(OSError):
        return (pathlib.Path(workdir) / URL_FILE).read_text()
    return ""


def checkpoints_of(workdir: str | os.PathLike[str]) -> str:
    """The folder of a run's checkpoints: in its folder, or in the bucket that this is a copy of."""
    return f"{url_of(workdir) or workdir}/{CHECKPOINTS}"


def shown(path: pathlib.Path) -> str:
    """A file of a run's folder as people find it: in the bucket, if the folder is a copy of one."""
    for folder in path.parents:
        if url := url_of(folder):
            return f"{url}/{path.relative_to(folder)}"
    return str(path)


def say_saved() -> None:
    """Touch the file by which a job's script sees progress, where checkpoints are in a bucket."""
    if path := os.environ.get("JAXVLM_SAVED"):
        with contextlib.suppress(OSError):
            pathlib.Path(path).touch()


def committed_steps(folder: str | os.PathLike[str]) -> list[int]:
    """Committed steps of a folder of checkpoints, oldest first; a URL's too."""
    if is_url(folder):
        from jaxvlm.stores.object_store import RemoteFolder

        store = RemoteFolder(str(folder))
        steps = (name for name in store.names("") if name.isdigit())
        return sorted(int(step) for step in steps if store.exists(f"{step}/{COMMITTED}"))
    if not (path := pathlib.Path(folder)).is_dir():
        return []
    return sorted(int(child.name) for child in path.iterdir() if child.name.isdecimal())


def has_checkpoint(workdir: pathlib.Path) -> bool:
    """Whether a step of the run was saved; its folder alone is there from the first start on."""
    return bool(committed_steps(checkpoints_of(workdir)))


def is_begun(workdir: str | pathlib.Path) -> bool:
    """Whether a folder holds a ``config.json``, as that of a run does."""
    return (pathlib.Path(workdir) / CONFIG).is_file()


def runs_in(folder: pathlib.Path) -> list[str]:
    """Names of a folder's folders that hold runs, as those of a federation's sites do."""
    found = (path.parent for path in folder.glob(f"*/{CONFIG}") if path.is_file())
    return sorted(path.name for path in found if has_checkpoint(path))


def read_config(workdir: str | pathlib.Path) -> Config:
    """Reads the settings of the run in ``workdir``.

    Raises:
        ConfigError: ``workdir`` holds no run, or its ``config.json`` is damaged.
    """
    path = pathlib.Path(workdir) / CONFIG
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
        elif inside := runs_in(path.parent):
            advice = (
                f"; runs are in its folders {', '.join(inside)}: name {path.parent / inside[0]}"
            )
        raise ConfigError(f"{workdir} holds no run: it has no {CONFIG}{advice}")
    try:
        document = json_text.read(path)
        if not isinstance(document["config"], dict):
            raise TypeError("its settings are no object")
        if isinstance(data := document["config"].get("data"), dict):
            data.pop("virtual_shards", None)  # older runs have it; their weights don't depend on it
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


def numeric_settings() -> dict[str, str]:
    """Return the settings of JAX and XLA that change results and are not the defaults.

    They come from variables (``JAX_DEFAULT_PRNG_IMPL``, ``NVIDIA_TF32_OVERRIDE``, ``XLA_FLAGS``) or
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
    named = (*_NUMERIC_VARIABLES, *OF_DEVICES)
    found |= {name: os.environ[name] for name in named if name in os.environ}
    for name in FLAGS:
        flags = os.environ.get(name, "").split()
        if kept := sorted(flag for flag in flags if not flag.startswith(_HARMLESS_FLAGS)):
            found[name] = " ".join(kept)
    return found


def code_of(config: Config) -> dict[str, str]:
    """Hashes of jaxvlm's source files, and of the files of a run's own losses, formats and so on.

    Args:
        config: of the run; a module that it names is one that was imported.

    Returns:
        ``jaxvlm``, or the setting that names the file -> the hash.
    """
    root = pathlib.Path(__file__).parents[1]
    files = {"jaxvlm": sorted(root.rglob("*.py"))}
    for setting, target in by_path(config).items():
        if setting.endswith(".target") and target:
            source = target.partition(":")[0]
            name = getattr(sys.modules.get(source), "__file__", None) or source
            files[setting] = [pathlib.Path(name)] if os.path.isfile(name) else []
    hashes = {}
    for name, paths in files.items():
        digest = hashlib.blake2b(digest_size=8)
        for path in paths:
            digest.update(path.name.encode() + path.read_bytes())
        hashes[name] = digest.hexdigest()
    return hashes


def program(config: Config) -> dict[str, Any]:
    """What computes a run: versions, commit, source and settings that change results; JSON-able."""
    return {
        "versions": versions(),
        "source files": code_of(config),
        "commit": source_commit(),
        "settings of JAX and XLA": numeric_settings(),
    }


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that compute a run."""
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
