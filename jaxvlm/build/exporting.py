"""Writing a model as the Hugging Face checkpoint that it came from."""

from __future__ import annotations

import contextlib
import json
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jaxvlm.build import pretrained
from jaxvlm.config import ConfigError, DualConfig, ModelConfig
from jaxvlm.data.processor import write_bounds
from jaxvlm.io import hf
from jaxvlm.models.families import any_family
from jaxvlm.types import Params, WeightMap

DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""What weights may be written as -> its name in a safetensors file."""
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5")
_FOLDERS = ("additional_chat_templates",)
_SMALL = 2**27  # bytes: what is larger is no tokenizer


def keep(source: pretrained.Source, workdir: pathlib.Path) -> None:
    """Keep in ``workdir`` what answering and exporting need besides the weights."""
    if (workdir / pretrained.SAVED).is_dir():
        return
    half = workdir / f"{pretrained.SAVED}.tmp"  # whole or not at all
    shutil.rmtree(half, ignore_errors=True)
    copy_files(source.files, half)
    layout = {name: list(stored) for name, stored in hf.read_layout(source.weights).items()}
    (half / pretrained.LAYOUT).write_text(json.dumps(layout), encoding="utf-8")
    half.rename(workdir / pretrained.SAVED)


def rewrite(
    source: pretrained.Source,
    output: pathlib.Path,
    params: Params,
    config: ModelConfig | DualConfig,
    dtype: str = "",
    more: Callable[[pathlib.Path], None] | None = None,
) -> dict[str, Any]:
    """Write a run's weights as ``source`` of :func:`exported`; see :func:`write`."""
    stored = pretrained.json_object(source.files / pretrained.LAYOUT)
    layout = {
        name: hf.Stored(file, kind, tuple(shape)) for name, (file, kind, shape) in stored.items()
    }
    return write(source.files, output, params, source.family.weights(config), layout, dtype, more)


def exported(
    workdir: pathlib.Path, output: pathlib.Path, config: ModelConfig | DualConfig, dtype: str
) -> pretrained.Source:
    """The checkpoint that a run's weights are written like.

    Args:
        workdir: of the run.
        output: where they are to be written.
        config: of the model.
        dtype: that is asked for.

    Raises:
        ConfigError: the run has no Hugging Face family, the folder is not empty, or the dtype is
            unknown.
    """
    source = pretrained.find(config.checkpoint, workdir, any_family)
    if source is None or not (workdir / pretrained.SAVED / pretrained.LAYOUT).is_file():
        raise ConfigError(
            f"{workdir}: its model is not of one Hugging Face checkpoint, so transformers has no "
            "place for it; towers of two checkpoints leave by --format=sentence_transformers"
        )
    check_output(output, dtype)
    return source


def write(
    files: pathlib.Path,
    output: pathlib.Path,
    params: Params,
    weights: WeightMap,
    layout: hf.Layout,
    dtype: str = "",
    more: Callable[[pathlib.Path], None] | None = None,
) -> dict[str, Any]:
    """Write a checkpoint; every process calls it.

    Args:
        files: folder of all that is no weight.
        output: a new folder.
        params: all of them.
        weights: which tensors hold which parameters.
        layout: of the source; what is no float in it is left out.
        dtype: ``float32``, ``bfloat16`` or ``float16``; "" is each tensor's own.
        more: writes what else belongs in the folder, which it is given; every process calls it.

    Returns:
        How many ``tensors`` and ``bytes`` were written.

    Raises:
        ConfigError: the folder is not empty, or there is no such dtype.
    """
    check_output(output, dtype)
    layout = {
        name: stored._replace(dtype=DTYPES.get(dtype, stored.dtype))
        for name, stored in layout.items()
        if stored.dtype in hf.DTYPES
    }
    with new_folder(output) as half:
        if not jax.process_index():
            copy_files(files, half)
            if dtype:
                _state_dtype(half / "config.json", dtype)
        hf.write_params(half, params, weights, layout)
        if more is not None:
            more(half)
    sizes = (np.prod(s.shape) * hf.DTYPES[s.dtype].itemsize for s in layout.values())
    return {"tensors": len(layout), "bytes": int(sum(sizes))}


def tell_bounds(folder: pathlib.Path, picture_pixels: tuple[int, int]) -> None:
    """Let the processor in ``folder`` scale pictures as a run had them scaled; process 0 does."""
    if any(picture_pixels) and not jax.process_index():
        write_bounds(folder, picture_pixels)


def check_output(output: pathlib.Path, dtype: str) -> None:
    """Refuse a folder that holds something, and a dtype that is not known."""
    if output.exists() and any(output.iterdir()):
        raise ConfigError(f"--output={output} is not empty; give a new folder")
    if dtype not in DTYPES and dtype:
        raise ConfigError(f"--dtype={dtype}; known: {', '.join(DTYPES)}")


@contextlib.contextmanager
def new_folder(output: pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder to write in, on process 0, that becomes ``output`` when all is written."""
    half = output.with_name(output.name + ".jaxvlm-tmp")
    if not jax.process_index():
        shutil.rmtree(half, ignore_errors=True)
        half.mkdir(parents=True)
    yield half
    if not jax.process_index():
        if output.exists():
            output.rmdir()
        half.rename(output)


def copy_files(source: pathlib.Path, target: pathlib.Path) -> None:
    """Copy all of a checkpoint's folder but its weights, and sentence-transformers' modules."""
    target.mkdir(parents=True, exist_ok=True)
    for module in pretrained.modules(source):
        if module.get("path") and (source / module["path"]).is_dir():
            copy_files(source / module["path"], target / module["path"])
    for folder in _FOLDERS:
        if (source / folder).is_dir():
            shutil.copytree(source / folder, target / folder)
    for path in sorted(source.iterdir()):
        other = path.name == pretrained.LAYOUT or any(path.match(p) for p in _WEIGHTS)
        if path.is_file() and not other and path.stat().st_size < _SMALL:
            shutil.copyfile(path, target / path.name)


def _state_dtype(path: pathlib.Path, dtype: str) -> None:
    config = pretrained.json_object(path)
    name = "torch_dtype" if "torch_dtype" in config else "dtype"
    path.write_text(json.dumps(config | {name: dtype}, indent=2) + "\n", encoding="utf-8")
