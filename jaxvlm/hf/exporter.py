"""Exports a model as a Hugging Face checkpoint, in the layout of the one that it came from."""

from __future__ import annotations

import contextlib
import json
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxvlm.config import ConfigError, DataConfig, DualConfig, ModelConfig, VideoConfig
from jaxvlm.config.merge import json_object, write_json
from jaxvlm.hf import pretrained, safetensors
from jaxvlm.hf.families import ChooseFamily, any_family, family_of
from jaxvlm.types import Params, WeightMap

DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""Value of --dtype -> the dtype's name in a safetensors file."""
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5")
_FOLDERS = ("additional_chat_templates",)
_SMALL = 2**27  # bytes: a larger file is not a tokenizer's or a config


def keep(source: pretrained.Source, workdir: pathlib.Path) -> None:
    """Copy to ``workdir`` the files that inference and export need in addition to the weights."""
    if (workdir / pretrained.SAVED).is_dir():
        return
    partial = workdir / f"{pretrained.SAVED}.tmp"  # renamed when complete
    shutil.rmtree(partial, ignore_errors=True)
    copy_files(source.files, partial)
    layout = safetensors.read_layout(source.weights)
    (partial / pretrained.LAYOUT).write_text(json.dumps(layout), encoding="utf-8")
    partial.rename(workdir / pretrained.SAVED)


def rewrite(
    source: pretrained.Source,
    output: pathlib.Path,
    params: Params,
    config: ModelConfig | DualConfig,
    dtype: str = "",
    more: Callable[[pathlib.Path], None] | None = None,
) -> dict[str, Any]:
    """Write a run's weights in the layout of :func:`exported`'s ``source``; as :func:`write`."""
    layout = saved_layout(source)
    return write(source.files, output, params, source.family.weights(config), layout, dtype, more)


def saved_layout(source: pretrained.Source) -> safetensors.Layout:
    """Read the layout of the source's weights from the workdir, where :func:`keep` wrote it."""
    stored = pretrained.json_object(source.files / pretrained.LAYOUT)
    outside = [file for file, *_ in stored.values() if file != pathlib.Path(file).name]
    if outside:
        raise ConfigError(
            f"{source.files / pretrained.LAYOUT} names a shard {outside[0]!r}, which is not in its "
            "own folder; train from the checkpoint again"
        )
    return {
        name: safetensors.Stored(file, kind, tuple(shape))
        for name, (file, kind, shape) in stored.items()
    }


def exported(
    workdir: pathlib.Path,
    output: pathlib.Path,
    config: ModelConfig | DualConfig,
    dtype: str,
    tower: str = "",
) -> pretrained.Source:
    """Find the checkpoint in whose layout a run's weights are exported.

    Args:
        workdir: workdir of the run.
        output: folder to write to.
        config: settings of the model.
        dtype: value of --dtype.
        tower: that the checkpoint is of; "" is the whole model.

    Raises:
        ConfigError: the run's model does not come from one Hugging Face checkpoint, the folder is
            not empty, or the dtype is unknown.
    """
    choose: ChooseFamily = any_family
    if isinstance(config, ModelConfig):
        choose = family_of(config.family, "config.model.family", any_family)
    source = pretrained.find(config.checkpoint, workdir, choose, tower)
    if source is None or not (workdir / tower / pretrained.SAVED / pretrained.LAYOUT).is_file():
        raise ConfigError(
            f"{workdir}: its model does not come from one Hugging Face checkpoint, so transformers "
            "has no class for it; use the run itself, with `jaxvlm generate --checkpoint`, "
            "`jaxvlm embed --checkpoint` or `jaxvlm.load` (a dual encoder of two checkpoints can "
            "be exported with --format=sentence_transformers)"
        )
    check_output(output, dtype)
    return source


def write(
    files: pathlib.Path,
    output: pathlib.Path,
    params: Params,
    weights: WeightMap,
    layout: safetensors.Layout,
    dtype: str = "",
    more: Callable[[pathlib.Path], None] | None = None,
) -> dict[str, Any]:
    """Write a checkpoint; every process calls it.

    Args:
        files: folder of all files other than weights.
        output: a new folder.
        params: all parameters.
        weights: map of tensors to parameters.
        layout: the source's layout; tensors that are not floats are left out.
        dtype: ``float32``, ``bfloat16`` or ``float16``; "" keeps each tensor's own.
        more: called with the folder to write further files; every process calls it.

    Returns:
        The number of ``tensors`` and ``bytes`` written.

    Raises:
        ConfigError: the folder is not empty, or the dtype is unknown.
    """
    check_output(output, dtype)
    layout = {
        name: stored._replace(dtype=DTYPES.get(dtype, stored.dtype))
        for name, stored in layout.items()
        if stored.dtype in safetensors.DTYPES
    }
    with new_folder(output) as partial:
        if not jax.process_index():
            copy_files(files, partial)
            if dtype:
                _write_dtype(partial / "config.json", dtype)
        safetensors.write_params(partial, params, weights, layout)
        if more is not None:
            more(partial)
    return {"tensors": len(layout), "bytes": safetensors.num_bytes(layout)}


def write_preprocessing(folder: pathlib.Path, data: DataConfig) -> None:
    """Write a run's bounds of image pixels, and its settings of videos, to the processors' files in
    ``folder``, on process 0."""
    from jaxvlm.data.images.processor import write_bounds  # imports image readers
    from jaxvlm.data.videos.video_processor import write_settings

    if not jax.process_index():
        if any(data.image_pixels_range) or data.video != VideoConfig():
            kind = str(json_object(folder / "config.json").get("model_type"))
            write_settings(folder, kind, data.video)  # first: its file may be that of images
        if any(data.image_pixels_range):
            write_bounds(folder, data.image_pixels_range)


def check_output(output: pathlib.Path, dtype: str) -> None:
    """Check that the output folder is empty and the dtype known.

    Raises:
        ConfigError: it is not.
    """
    if output.exists() and any(output.iterdir()):
        raise ConfigError(f"--output={output} is not empty; give a new folder")
    if dtype not in DTYPES and dtype:
        raise ConfigError(f"--dtype={dtype}; known: {', '.join(DTYPES)}")


@contextlib.contextmanager
def new_folder(output: pathlib.Path) -> Iterator[pathlib.Path]:
    """Create a temporary folder on process 0, and rename it to ``output`` when it is complete."""
    partial = output.with_name(output.name + ".jaxvlm-tmp")
    if not jax.process_index():
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    try:
        yield partial
    except BaseException:
        if not jax.process_index():
            shutil.rmtree(partial, ignore_errors=True)
        raise
    if not jax.process_index():
        if output.exists():
            output.rmdir()
        partial.rename(output)


def copy_files(source: pathlib.Path, target: pathlib.Path) -> None:
    """Copy a checkpoint's folder and its sentence-transformers modules, without weights.

    Raises:
        ConfigError: a symbolic link to a file outside of the folder, other than a blob of the same
            repository in Hugging Face's cache.
    """
    _copy_files(source, target, _roots(source))


def _copy_files(source: pathlib.Path, target: pathlib.Path, roots: list[pathlib.Path]) -> None:
    target.mkdir(parents=True, exist_ok=True)
    folders = [module["path"] for module in pretrained.modules(source) if module.get("path")]
    for folder in [*folders, *_FOLDERS]:
        if (source / folder).is_dir():
            _copy_files(source / folder, target / folder, roots)
    for path in sorted(source.iterdir()):
        excluded = path.name == pretrained.LAYOUT or any(path.match(p) for p in _WEIGHTS)
        if path.is_file() and not excluded and path.stat().st_size < _SMALL:
            if not any(path.resolve().is_relative_to(root) for root in roots):
                raise ConfigError(
                    f"{path} is a link to {path.resolve()}, outside of the checkpoint's folder, so "
                    "it is not copied; put the file itself there, or remove the link"
                )
            shutil.copyfile(path, target / path.name)


def _roots(source: pathlib.Path) -> list[pathlib.Path]:
    """The folders that a checkpoint's files may lie in: its own, and the hub cache's blobs."""
    whole = source.resolve()
    is_hub = whole.parent.name == "snapshots" and whole.parents[1].name.startswith("models--")
    return [whole, whole.parents[1] / "blobs"] if is_hub else [whole]


def remove_modules(folder: pathlib.Path) -> None:
    """Remove the folders of sentence-transformers modules."""
    for module in pretrained.modules(folder):
        if module.get("path"):
            shutil.rmtree(folder / module["path"], ignore_errors=True)


def _write_dtype(path: pathlib.Path, dtype: str) -> None:
    config = pretrained.json_object(path)
    name = "torch_dtype" if "torch_dtype" in config else "dtype"
    write_json(path, config | {name: dtype})
