"""Loads trained models from a run's folder or a Hugging Face checkpoint."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from typing import Any

from jaxvlm.checkpoint import run_changes, run_folder, run_record
from jaxvlm.checkpoint.restore import restore_params, saved_params
from jaxvlm.config import (
    Config,
    ConfigError,
    DataConfig,
    Extension,
    LoraConfig,
    MeshConfig,
    ModelConfig,
)
from jaxvlm.hf import dual_encoder, peft_folder, pretrained
from jaxvlm.hf.families import ENCODERS, any_family, family_of, sentences
from jaxvlm.hf.run_processor import image_format_of, make_tokenizer, with_vocab
from jaxvlm.inference import encoder, input_types
from jaxvlm.inference.vlm import VLM
from jaxvlm.losses.registry import trains_embeddings
from jaxvlm.parallel.distributed.processes import set_up_process
from jaxvlm.parallel.mesh import make_mesh, mesh_config
from jaxvlm.spmd.model import build_model
from jaxvlm.types import Params


def load(
    folder: str | os.PathLike[str],
    which: str = "best",
    mesh: MeshConfig | str | None = None,
    adapter: str | os.PathLike[str] = "",
    dtype: str = "",
    family: str = "",
) -> VLM | encoder.Encoder:
    """Loads a trained model from a run's folder or a Hugging Face checkpoint.

    Args:
        folder: a workdir of ``jaxvlm train``, a folder with ``config.json`` and safetensors, or
            an id of the Hugging Face hub.
        which: checkpoint of a workdir: ``best`` by the run's metric (the latest if none was
            evaluated) or ``latest``.
        mesh: the mesh to place the model on, a :class:`jaxvlm.config.MeshConfig` or its axes, as in
            ``"data=2,tensor=4"``; all devices on ``data`` if ``None``.
        adapter: PEFT adapter folder (LoRA, DoRA) to load with a Hugging Face checkpoint.
        dtype: dtype of the computation, ``float32`` or ``bfloat16``; "" is that of the run, and
            float32 for a Hugging Face checkpoint.
        family: names the user's own model family of a Hugging Face checkpoint, as
            ``config.model.family.target`` does; "" takes the built-in one of its ``model_type``.

    Returns:
        An :class:`~jaxvlm.inference.encoder.Encoder` for a dual or text encoder (CLIP, SigLIP, a
        sentence-transformers folder), else a :class:`VLM`.

    Raises:
        ConfigError: the folder holds neither, or the adapter does not fit it.
        CheckpointError: no checkpoint can be read.
    """
    mesh = mesh_config(mesh)
    folder = run_folder.local_to_read(folder, "checkpoint")
    hugging_face = pretrained.is_checkpoint(folder)
    workdir = pathlib.Path(folder)
    if hugging_face:
        config = _hugging_face_config(folder, adapter, family)
        own = config.model.family
        source = pretrained.find(str(folder), choose=family_of(own, "family", any_family))
        if source is not None and source.family in ENCODERS.values():
            if adapter:
                why = "is an encoder, and adapters of encoders can't be loaded"
                raise ConfigError(f"adapter={adapter}: {folder} {why}")
            return encoder.load(source, mesh, dtype)
        if source is not None:
            config = pretrained.with_source(config, source)
        config = peft_folder.with_adapter(config, source, None)
        if source is not None and (modules := pretrained.modules(source.files)):
            pooling = pretrained.module_config(source.files, modules)
            sentences.check_last(modules, pooling, config.model.decoder.width)
    else:
        _refuse_of_run(folder, adapter, family)
        config = run_changes.read_config_to_use(workdir)
        if trains_embeddings(config) and config.embedder == "dual":
            return _load_run_encoder(config, workdir, which, mesh, dtype)
        source = pretrained.find_for(config.model, workdir)
    set_up_process(config.compile_cache)
    saved = None if hugging_face else workdir / "tokenizer"
    tokenizer = make_tokenizer(config, saved, tuple, source)
    if source is not None:
        pretrained.check_tokens(source, tokenizer)
    config = dataclasses.replace(config, model=with_vocab(config.model, tokenizer.vocab_size))
    settings = dataclasses.replace(config.model, dtype=dtype or config.model.dtype)
    settings = _for_stages(settings, mesh)
    config = dataclasses.replace(config, model=settings)
    embeddings = config.embedding if trains_embeddings(config) else None
    model = build_model(settings, make_mesh(mesh), embeddings=embeddings)
    images = image_format_of(config, source, tokenizer)
    if hugging_face and source is not None:
        params = peft_folder.read_params(source, model, config.seed)
    else:
        model, params = _of_run(config, workdir, model, which)
    types = input_types.of(source, None if hugging_face else config)
    return VLM(config, model, params, tokenizer, images, types)


def _refuse_of_run(
    folder: str | os.PathLike[str], adapter: str | os.PathLike[str], family: str
) -> None:
    """Refuse what a run has of its own."""
    if adapter:
        raise ConfigError(
            f"adapter={adapter}: {folder} is a run, whose weights include its adapters; to add "
            "another, export the run first (jaxvlm export --merged)"
        )
    if family:
        raise ConfigError(
            f"family={family}: {folder} is a run, which has its own in config.model.family"
        )


def _hugging_face_config(
    folder: str | os.PathLike[str], adapter: str | os.PathLike[str], family: str
) -> Config:
    """Settings for a Hugging Face checkpoint; its dims are filled in later."""
    lora = LoraConfig(checkpoint=str(adapter))
    own = Extension(target=family)
    model = ModelConfig(checkpoint=str(folder), lora=lora, family=own)
    # Sequences are as long as their records need, up to a length that no chat reaches.
    data = DataConfig(max_length=16_384, max_images_per_sequence=128, packing=False, buckets=32)
    return Config(model=model, data=data)


def _for_stages(model: ModelConfig, mesh: MeshConfig) -> ModelConfig:
    """Settings that a pipeline's stages take: the backward pass alone reads ``remat``."""
    if mesh.pipeline == 1:
        return model
    parts = {x: dataclasses.replace(getattr(model, x), remat="full") for x in ("vision", "decoder")}
    return dataclasses.replace(model, **parts)


def _of_run(config: Config, workdir: pathlib.Path, model: Any, which: str) -> tuple[Any, Params]:
    """Restores a run's weights; the model holds them in the dtypes in which the run did."""
    folder = run_record.checkpoints_of(workdir)
    choice = (config.checkpoint.metric, config.checkpoint.mode)
    model = model.holding({path: x.dtype for path, x in saved_params(folder).items()})
    return model, restore_params(folder, model.abstract(), which, *choice)


def _load_run_encoder(
    config: Config, workdir: pathlib.Path, which: str, mesh: MeshConfig, dtype: str
) -> encoder.Encoder:
    """Loads the dual encoder of a run."""
    set_up_process(config.compile_cache)
    loaded = dual_encoder.make_dual_encoder(config, workdir, tuple)
    settings = dataclasses.replace(loaded.config, dtype=dtype or loaded.config.dtype)
    model = build_model(settings, make_mesh(mesh))
    model, params = _of_run(config, workdir, model, which)
    config = dataclasses.replace(config, dual=settings)
    inputs = (loaded.tokenizer, loaded.image_processor)
    return encoder.Encoder(loaded.source, model, params, *inputs, config)
