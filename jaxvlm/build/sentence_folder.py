"""A run of vectors as a folder that sentence-transformers loads."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxvlm.build import exporting, pretrained, router_folder
from jaxvlm.build.encoder import Encoder
from jaxvlm.build.loaded import Loaded
from jaxvlm.build.losses import of_vectors
from jaxvlm.config import ConfigError, DualConfig, ModelConfig, TrainConfig
from jaxvlm.data import chat
from jaxvlm.io import hf
from jaxvlm.models.embedder import TOKENS
from jaxvlm.models.families import sentence_files
from jaxvlm.models.families.sentence_files import Vectors
from jaxvlm.types import Params

FLAG = "--format=sentence_transformers"
TEXT = ("text",)


class _Folder(NamedTuple):
    """What is written."""

    kept: pathlib.Path
    """Workdir, or folder in it, that has what the checkpoint said."""
    config: DualConfig | ModelConfig
    """Of the model, naming the checkpoint."""
    vectors: Vectors
    maps: tuple[str, str]
    """Parameters of the linear map: weight and bias."""
    length: int = 0
    patches: int = 0
    lower: bool = False
    """See :func:`sentence_files.inputs`."""


def export(
    model: Loaded | Encoder,
    workdir: pathlib.Path,
    output: pathlib.Path,
    dtype: str = "",
    truncate_dim: int = 0,
) -> dict[str, Any]:
    """Write a run's model, adapters added to its weights, with the modules that make vectors.

    Args:
        model: the run's.
        workdir: of the run.
        output: a new folder.
        dtype: ``float32``, ``bfloat16`` or ``float16``; "" is each tensor's own in the source.
        truncate_dim: dims of the vectors that the folder gives: a prefix that the run has trained
            (Matryoshka). 0: all.

    Returns:
        How many ``tensors`` and ``bytes`` were written.

    Raises:
        ConfigError: sentence-transformers has no place for what the run is, or the folder is not
            empty.
    """
    run = model.run if isinstance(model, Encoder) else model.config
    if run is None or not of_vectors(run):
        raise ConfigError(f"{FLAG}: the run in {workdir} was not trained to make vectors")
    dims = run.pair_loss.dims
    if truncate_dim and truncate_dim not in dims:
        trained = f"prefixes of {', '.join(map(str, dims))}" if dims else "no prefixes"
        raise ConfigError(f"--truncate_dim={truncate_dim}: the run trained {trained}; leave it out")
    if isinstance(model, Encoder) and model.source is None and model.model.config.towers != TEXT:
        return _two(model, run, workdir, output, dtype, truncate_dim)
    made = _encoder(model, run, workdir) if isinstance(model, Encoder) else _chat(model, workdir)
    vectors = made.vectors._replace(truncate_dim=truncate_dim)
    source = exporting.exported(made.kept, output, made.config, dtype)
    kind = str(source.hf_config.get("model_type"))
    dual = made.config if isinstance(made.config, DualConfig) else None
    first = sentence_files.inputs(kind, dual, made.length, made.patches, made.lower)
    files = sentence_files.files(kind, vectors, first)
    params = model.model.merged(model.params) if model.model.adapted else model.params

    def more(folder: pathlib.Path) -> None:
        exporting.tell_bounds(folder, run.data.picture_pixels)
        if not jax.process_index():
            for module in pretrained.modules(folder):  # of the source
                if module.get("path"):
                    shutil.rmtree(folder / module["path"], ignore_errors=True)
            for name, content in files.items():
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        if vectors.dense:
            _write_map(folder / sentence_files.linear_map(files), params, made.maps)

    return exporting.rewrite(source, output, params, made.config, dtype, more)


def _two(
    model: Encoder,
    run: TrainConfig,
    workdir: pathlib.Path,
    output: pathlib.Path,
    dtype: str,
    truncate_dim: int,
) -> dict[str, Any]:
    """Towers of two checkpoints."""
    config, words = model.model.config, model.tokenizer
    found = router_folder.sources(model, workdir, FLAG)
    assert words is not None
    vectors = {
        tower: _vectors(model, run, tower)._replace(truncate_dim=truncate_dim) for tower in found
    }
    lower = words.style.clean is str.lower
    first = sentence_files.inputs("bert", config, words.style.max_length, lower=lower)
    return router_folder.write(model, found, output, vectors, first, dtype, _write_map)


def _vectors(model: Encoder, run: TrainConfig, tower: str) -> Vectors:
    """How a tower's states become vectors; "": both towers' own heads do it."""
    config, pairs = model.model.config, run.data.pairs
    mapped = tower in config.project
    width = getattr(config, tower or "text").width
    return Vectors(
        pool=config.text.pool if tower == "text" else "",
        width=width,
        dense=(config.embed_dim, config.project_bias) if mapped else None,
        normalize=config.normalize,
        prompts={"query": pairs.query_instruction, "document": pairs.document_instruction},
        default=None,
        similarity=run.pair_loss.similarity,
        truncate_dim=0,
    )


def _write_map(folder: pathlib.Path, params: Params, maps: tuple[str, str]) -> None:
    named = {"linear.weight": maps[0], "linear.bias": maps[1]}
    named = {theirs: ours for theirs, ours in named.items() if ours in params}
    layout = {
        theirs: hf.Stored(hf.SINGLE, "F32", params[ours].shape[::-1])
        for theirs, ours in named.items()
    }
    hf.write_tensors(
        folder, layout, lambda theirs: np.ascontiguousarray(hf.host(params[named[theirs]]).T)
    )


def _encoder(model: Encoder, run: TrainConfig, workdir: pathlib.Path) -> _Folder:
    config = model.model.config
    if model.source is None and config.text_checkpoint:
        kept = workdir / "text"
        config = dataclasses.replace(config, checkpoint=config.text_checkpoint)
    elif model.source is None:
        raise ConfigError(
            f"{FLAG}: the text tower of the run in {workdir} is not of a checkpoint "
            "(config.dual.text_checkpoint): sentence-transformers has no model for it"
        )
    else:
        kept = workdir
    assert model.tokenizer is not None
    vectors = _vectors(model, run, "text" if config.towers == TEXT else "")
    patches = model.pictures.most_patches if model.pictures else 0
    maps = ("head/text", "head/text_bias")
    style = model.tokenizer.style
    lower = style.clean is str.lower
    return _Folder(kept, config, vectors, maps, style.max_length, patches, lower)


def _chat(model: Loaded, workdir: pathlib.Path) -> _Folder:
    run, how = model.config, model.config.vectors
    if how.pool == TOKENS:
        raise ConfigError(
            f"{FLAG}: the run in {workdir} makes a vector of each token "
            f"(config.vectors.pool={TOKENS!r}), and a SentenceTransformer one of an item"
        )

    def told(instruction: str) -> str:
        return chat.to_embed("", instruction)[0].content

    pairs = run.data.pairs
    prompts = {
        "default": told(""),
        "query": told(pairs.query_instruction),
        "document": told(pairs.document_instruction),
    }
    vectors = Vectors(
        pool=how.pool,
        width=run.model.decoder.width,
        dense=(how.dim, False) if how.dim else None,
        normalize=how.normalize,
        prompts=prompts,
        default="default",
        similarity=run.pair_loss.similarity,
        truncate_dim=0,
    )
    return _Folder(workdir, model.model.config, vectors, ("head/project", ""))
