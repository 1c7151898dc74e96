"""Exports a run that trains embeddings as a sentence-transformers folder."""

from __future__ import annotations

import dataclasses
import logging
import pathlib
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxvlm.config import Config, ConfigError, DualConfig, ModelConfig
from jaxvlm.config.merge import write_json
from jaxvlm.data.conversations import tokenize
from jaxvlm.hf import exporter, safetensors
from jaxvlm.hf.families import sentence_files
from jaxvlm.hf.families.sentence_files import EmbeddingModules
from jaxvlm.inference import input_types, sentence_router
from jaxvlm.inference.encoder import Encoder
from jaxvlm.inference.vlm import VLM
from jaxvlm.losses.registry import trains_embeddings
from jaxvlm.models.embedder import TOKENS
from jaxvlm.types import Params

_log = logging.getLogger(__name__)
FLAG = "--format=sentence_transformers"
TEXT = ("text",)


class _Folder(NamedTuple):
    """The content of the folder to write."""

    tower: str
    """Tower that the checkpoint is of; "" is the whole model."""
    config: DualConfig | ModelConfig
    """Settings of the model, which name the checkpoint."""
    embeddings: EmbeddingModules
    """The modules that turn hidden states into embeddings."""
    maps: tuple[str, str]
    """Names of the parameters of the linear map: weight and bias."""
    length: int = 0
    """Maximum length of a text; this and the next two: see :func:`sentence_files.inputs`."""
    patches: int = 0
    """Maximum number of patches of an image."""
    lower: bool = False
    """Whether texts are lowercased."""


def export(
    model: VLM | Encoder,
    workdir: pathlib.Path,
    output: pathlib.Path,
    dtype: str = "",
    truncate_dim: int = 0,
    max_seq_length: int = 0,
) -> dict[str, Any]:
    """Writes a run's model, with adapters merged, and the modules that compute embeddings.

    Args:
        model: model of the run.
        workdir: folder of the run.
        output: new folder to write.
        dtype: ``float32``, ``bfloat16`` or ``float16``; "" keeps the dtype that each tensor has in
            the source.
        truncate_dim: number of dims to which the folder truncates its embeddings, one of the
            prefixes that the run trained (Matryoshka); 0 keeps all dims.
        max_seq_length: number of tokens to which the folder truncates texts; 0: as the run does.

    Returns:
        The numbers of ``tensors`` and ``bytes`` that were written.

    Raises:
        ConfigError: sentence-transformers can't represent the run, or the folder is not empty.
    """
    run = model.run if isinstance(model, Encoder) else model.config
    if run is None or not trains_embeddings(run):
        raise ConfigError(f"{FLAG}: the run in {workdir} does not train embeddings")
    dims = run.pair_loss.matryoshka_dims
    if truncate_dim and truncate_dim not in dims:
        trained = f"prefixes of {', '.join(map(str, dims))}" if dims else "no prefixes"
        raise ConfigError(f"--truncate_dim={truncate_dim}: the run trained {trained}; leave it out")
    length = _length(model, run, max_seq_length)
    if isinstance(model, Encoder) and model.source is None and model.model.config.towers != TEXT:
        return _export_two_checkpoints(model, run, workdir, output, dtype, truncate_dim, length)
    if isinstance(model, Encoder):
        contents = _of_encoder(model, run, workdir)._replace(length=length)
    else:
        if run.data.resize != "auto":
            raise ConfigError(
                f"{FLAG}: the run in {workdir} resizes images by config.data.resize="
                f"{run.data.resize!r}, which the checkpoint's image processor does not; "
                "--format=huggingface writes the weights"
            )
        contents = _of_decoder(model, workdir)
    embeddings = contents.embeddings._replace(truncate_dim=truncate_dim)
    source = exporter.exported(workdir, output, contents.config, dtype, contents.tower)
    kind = str(source.hf_config.get("model_type"))
    dual = contents.config if isinstance(contents.config, DualConfig) else None
    first = sentence_files.inputs(kind, dual, contents.length, contents.patches, contents.lower)
    files = sentence_files.files(kind, embeddings, first)
    params = model.model.merged(model.params) if model.model.adapted else model.params

    def write_more(folder: pathlib.Path) -> None:
        exporter.write_preprocessing(folder, run.data)
        if not jax.process_index():
            exporter.remove_modules(folder)  # of the source
            for name, content in files.items():
                (folder / name).parent.mkdir(exist_ok=True)
                write_json(folder / name, content)
        if embeddings.dense:
            _write_map(folder / sentence_files.linear_map(files), params, contents.maps)

    return exporter.rewrite(source, output, params, contents.config, dtype, write_more)


def _export_two_checkpoints(
    model: Encoder,
    run: Config,
    workdir: pathlib.Path,
    output: pathlib.Path,
    dtype: str,
    truncate_dim: int,
    length: int,
) -> dict[str, Any]:
    """Exports a dual encoder whose towers come from two checkpoints."""
    config, tokenizer = model.model.config, model.tokenizer
    checkpoints = sentence_router.sources(model, workdir, FLAG)
    assert tokenizer is not None
    embeddings = {
        tower: _embeddings(model, run, tower)._replace(truncate_dim=truncate_dim)
        for tower in checkpoints
    }
    lower = tokenizer.style.clean is str.lower
    first = sentence_files.inputs("bert", config, length, lower=lower)
    return sentence_router.write(model, checkpoints, output, embeddings, first, dtype, _write_map)


def _length(model: VLM | Encoder, run: Config, given: int) -> int:
    """The number of tokens to which the folder truncates texts; 0 where it does not.

    Raises:
        ConfigError: the run truncates queries and documents differently, or pads texts to another
            length than it truncates them to, and ``given`` does not choose.
    """
    types = input_types.of_run(run)
    limits = {name: own.max_length for name, own in types.items()}
    if not isinstance(model, Encoder):
        if given:
            raise ConfigError(
                f"--max_seq_length={given}: a SentenceTransformer does not truncate the prompts of "
                "a model with a chat template; leave it out"
            )
        text = "texts of more than %d tokens, which the run truncates, are not truncated by %s"
        _log.warning(text, min(limits.values()), "SentenceTransformer")
        return 0
    if model.tokenizer is None:
        return 0
    style = model.tokenizer.style
    limits = {name: min(limit, style.max_length) for name, limit in limits.items()}
    if given:
        if given > style.max_length:
            raise ConfigError(
                f"--max_seq_length={given}: the model takes at most {style.max_length} tokens"
            )
        return given
    if len(set(limits.values())) > 1:
        raise ConfigError(
            f"{FLAG}: the run truncates queries to {limits['query']} tokens and documents to "
            f"{limits['document']}, but a SentenceTransformer has one limit; choose it with "
            "--max_seq_length=N"
        )
    if style.see_padding and limits["query"] < style.max_length:
        raise ConfigError(
            f"{FLAG}: the run truncates texts to {limits['query']} tokens and pads them to "
            f"{style.max_length}, but a SentenceTransformer truncates and pads to one length; "
            "choose it with --max_seq_length=N"
        )
    return limits["query"]


def _embeddings(model: Encoder, run: Config, tower: str) -> EmbeddingModules:
    """The modules that turn a tower's hidden states into embeddings; "" for both towers' heads."""
    config, pairs = model.model.config, run.data.pairs
    has_map = tower in config.project
    width = getattr(config, tower or "text").width
    return EmbeddingModules(
        pool=config.text.pool if tower == "text" else "",
        width=width,
        dense=(config.embed_dim, config.project_bias) if has_map else None,
        normalize=config.normalize,
        prompts={"query": pairs.query_instruction, "document": pairs.document_instruction},
        default=None,
        similarity=run.pair_loss.similarity,
        truncate_dim=0,
    )


def _write_map(folder: pathlib.Path, params: Params, maps: tuple[str, str]) -> None:
    """Writes the linear map as a Dense module of sentence-transformers."""
    names = {"linear.weight": maps[0], "linear.bias": maps[1]}
    names = {theirs: ours for theirs, ours in names.items() if ours in params}
    layout = {
        theirs: safetensors.Stored(safetensors.SINGLE, "F32", params[ours].shape[::-1])
        for theirs, ours in names.items()
    }

    def make(theirs: str) -> np.ndarray:
        return np.ascontiguousarray(safetensors.host(params[names[theirs]]).T)

    safetensors.write_tensors(folder, layout, make)


def _of_encoder(model: Encoder, run: Config, workdir: pathlib.Path) -> _Folder:
    config, tower = model.model.config, ""
    if model.source is None and config.text_checkpoint:
        tower = "text"
        config = dataclasses.replace(config, checkpoint=config.text_checkpoint)
    elif model.source is None:
        raise ConfigError(
            f"{FLAG}: the text tower of the run in {workdir} does not come from a checkpoint "
            "(config.dual.text_checkpoint), so sentence-transformers has no model for it"
        )
    assert model.tokenizer is not None
    embeddings = _embeddings(model, run, "text" if config.towers == TEXT else "")
    patches = model.image_processor.max_patches if model.image_processor else 0
    maps = ("head/text", "head/text_bias")
    lower = model.tokenizer.style.clean is str.lower
    return _Folder(tower, config, embeddings, maps, 0, patches, lower)


def _of_decoder(model: VLM, workdir: pathlib.Path) -> _Folder:
    run, embedding = model.config, model.config.embedding
    if embedding.pool == TOKENS:
        raise ConfigError(
            f"{FLAG}: the run in {workdir} computes an embedding per token "
            f"(config.embedding.pool={TOKENS!r}), but a SentenceTransformer computes one per item"
        )

    def system_prompt(instruction: str) -> str:
        return tokenize.to_embed("", instruction)[0].content

    pairs = run.data.pairs
    prompts = {
        "default": system_prompt(""),
        "query": system_prompt(pairs.query_instruction),
        "document": system_prompt(pairs.document_instruction),
    }
    embeddings = EmbeddingModules(
        pool=embedding.pool,
        width=run.model.decoder.width,
        dense=(embedding.dim, False) if embedding.dim else None,
        normalize=embedding.normalize,
        prompts=prompts,
        default="default",
        similarity=run.pair_loss.similarity,
        truncate_dim=0,
    )
    return _Folder("", model.model.config, embeddings, ("head/project", ""))
