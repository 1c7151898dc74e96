"""What a process does to JAX before it starts."""

from __future__ import annotations

import ctypes
import pathlib
import sys

import jax


def use_compile_cache(setting: str) -> None:
    """Keep compiled programs on disk, so that the next start is fast.

    Args:
        setting: a folder, ``auto`` (the user's cache), or ``""`` for none.
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
    """Let glibc reuse what a CPU step frees, instead of handing it back to the kernel.

    A step allocates its temporary buffers anew; returned and faulted in again page by page, they
    cost a fifth of a step. To be called before JAX starts its threads. Does nothing where there
    is an accelerator, whose buffers are elsewhere, or another C library.
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
