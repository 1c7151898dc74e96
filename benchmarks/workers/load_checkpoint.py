"""Loads a checkpoint once, in this process: prints seconds and memory gained as JSON."""

from __future__ import annotations

import json
import pathlib
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import Any


def status(field: str) -> int:
    """Bytes, of ``/proc/self/status``."""
    text = pathlib.Path("/proc/self/status").read_text()
    found = re.search(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


class Peak:
    """The most anonymous memory while it watches."""

    def __init__(self) -> None:
        self.bytes, self._done = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self.bytes = max(self.bytes, status("RssAnon"))


def transformers_load(folder: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """(load, read all) of transformers."""
    import torch
    from transformers import AutoModelForImageTextToText

    def load() -> Any:
        return AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.bfloat16, trust_remote_code=False
        )

    return load, lambda model: sum(float(p.sum()) for p in model.parameters())


def our_load(folder: str, devices: int) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """(load, read all) of ours."""
    import jax
    import numpy as np

    from jaxvlm.config import MeshConfig
    from jaxvlm.hf import pretrained
    from jaxvlm.parallel.mesh import make_mesh
    from jaxvlm.spmd.model import build_model

    source = pretrained.find(folder)
    assert source is not None
    config = source.family.config_from_hf(source.hf_config)
    mesh = MeshConfig(fsdp=4, tensor=2) if devices == 8 else MeshConfig(data=1)
    model = build_model(config, make_mesh(mesh, jax.devices()[:devices]))

    def load() -> Any:
        abstract = {
            path: jax.ShapeDtypeStruct(x.shape, jax.numpy.bfloat16, sharding=model.shardings[path])
            for path, x in model.shapes.items()
        }
        return pretrained.read_params(source, config, abstract)

    def read_all(params: Any) -> Any:
        shards = (s for p in params.values() for s in p.addressable_shards)
        return sum(int(np.asarray(s.data).view(np.uint16).max()) for s in shards)

    return load, read_all


def main() -> None:
    """Load, then read every parameter."""
    name, folder = sys.argv[1:]
    devices = 8 if name == "ours_eight_devices" else 1
    load, read_all = (
        transformers_load(folder) if name == "transformers" else our_load(folder, devices)
    )
    anonymous, resident = status("RssAnon"), status("VmHWM")
    start = time.perf_counter()
    with Peak() as peak:
        model = load()
        loaded = time.perf_counter() - start
        read_all(model)
        read = time.perf_counter() - start
    found = {
        "load_s": loaded,
        "load_and_read_s": read,
        "peak_anonymous_gb": (peak.bytes - anonymous) / 1e9,
        "peak_resident_gb": (status("VmHWM") - resident) / 1e9,
    }
    print(json.dumps({key: round(value, 3) for key, value in found.items()}))


if __name__ == "__main__":
    main()
