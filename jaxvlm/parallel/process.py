"""Process-wide settings to apply before JAX starts: compilation cache and CPU allocator."""

from __future__ import annotations

import ctypes
import pathlib
import sys

import jax


def set_up_process(compile_cache: str) -> None:
    """Apply all settings of this module; to be called before JAX starts its threads.

    Args:
        compile_cache: see :func:`use_compile_cache`.
    """
    keep_freed_memory()
    use_compile_cache(compile_cache)


def use_compile_cache(setting: str) -> None:
    """Enable JAX's persistent compilation cache, so that the next start is fast.

    Args:
        setting: a folder, ``auto`` (``~/.cache/jaxvlm/xla``), or ``""`` for none.
    """
    if not setting or jax.config.values["jax_compilation_cache_dir"]:
        return
    folder = pathlib.Path("~/.cache/jaxvlm/xla" if setting == "auto" else setting).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return  # a read-only home: slower, not wrong
    jax.config.update("jax_compilation_cache_dir", str(folder))


def keep_freed_memory() -> None:
    """Let glibc reuse memory that a CPU step frees, instead of returning it to the kernel.

    Every step allocates its temporary buffers; page faults on returned memory cost a fifth of a
    step. To be called before JAX starts its threads. Does nothing on a machine with an
    accelerator, whose buffers are not in host memory, or with another C library.
    """
    platforms = jax.config.values["jax_platforms"] or ""
    accelerators = ("/dev/nvidiactl", "/dev/accel0", "/dev/vfio/0", "/dev/kfd")
    if platforms != "cpu" and any(pathlib.Path(path).exists() for path in accelerators):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        for option, value in (_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1), (_M_ARENA_MAX, 1):
            mallopt(option, value)


_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8  # malloc.h
