"""Exports a dual encoder of two checkpoints as a Router folder of sentence-transformers."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import jax

from jaxvlm.config import ConfigError
from jaxvlm.config.merge import write_json
from jaxvlm.data.images import processor
from jaxvlm.hf import exporter, pretrained, safetensors
from jaxvlm.hf.encoder_folder import described
from jaxvlm.hf.families import any_family, sentence_files
from jaxvlm.hf.families.sentence_files import EmbeddingModules
from jaxvlm.inference.encoder import Encoder
from jaxvlm.types import Params

_VISION = {"clip": "clip_vision_model", "siglip": "siglip_vision_model"}
"""``model_type`` of a checkpoint -> ``model_type`` of its vision encoder alone."""
_TEXT = ("bert",)
_REPLACED_FILES = ("modules.json", "config_sentence_transformers.json", "config.json")
WriteMap = Callable[[pathlib.Path, Params, tuple[str, str]], None]


def sources(model: Encoder, workdir: pathlib.Path, flag: str) -> dict[str, pretrained.Source]:
    """Finds the checkpoint of each tower among the files that a run saved.

    Args:
        model: model of the run.
        workdir: folder of the run.
        flag: flag that error messages start with.

    Returns:
        Tower -> its checkpoint.

    Raises:
        ConfigError: a tower has no checkpoint, or sentence-transformers has no model for that tower
            alone.
    """
    checkpoints, config = {}, model.model.config
    for tower, kinds in (("text", _TEXT), ("vision", tuple(_VISION))):
        name = getattr(config, f"{tower}_checkpoint")
        is_saved = (workdir / tower / pretrained.SAVED / pretrained.LAYOUT).is_file()
        source = pretrained.find(name, workdir, any_family, tower) if name and is_saved else None
        kind = source.hf_config.get("model_type") if source else "none"
        if source is None or kind not in kinds:
            raise ConfigError(
                f"{flag}: the run in {workdir} does not come from one checkpoint "
                f"(config.dual.checkpoint), and the checkpoint of its {tower} tower is {kind}; "
                f"for two towers sentence-transformers supports {' or '.join(kinds)} "
                f"(config.dual.{tower}_checkpoint)"
            )
        checkpoints[tower] = source
    return checkpoints


def write(
    model: Encoder,
    checkpoints: dict[str, pretrained.Source],
    output: pathlib.Path,
    embeddings: dict[str, EmbeddingModules],
    first: dict[str, Any],
    dtype: str,
    write_map: WriteMap,
) -> dict[str, Any]:
    """Writes both towers as the routes of a Router, which chooses by the type of an item.

    Args:
        model: model of the run.
        checkpoints: result of :func:`sources`.
        output: new folder to write.
        embeddings: for each tower, the modules that turn its hidden states into embeddings.
        first: settings of the text inputs; see ``sentence_files.inputs``.
        dtype: dtype of the weights; "" keeps the dtype that each tensor has in the source.
        write_map: function that writes a linear map.

    Returns:
        The numbers of ``tensors`` and ``bytes`` that were written.
    """
    exporter.check_output(output, dtype)
    params = model.model.merged(model.params) if model.model.adapted else model.params
    inputs = {"text": first, "vision": sentence_files.SEEN}
    routes, count, size = {}, 0, 0
    with exporter.new_folder(output) as folder:
        for tower, source in checkpoints.items():
            kind = str(source.hf_config["model_type"])
            files = sentence_files.files(_VISION.get(kind, kind), embeddings[tower], inputs[tower])
            routes[tower] = files
            tower_folder = folder / f"{tower}_{sentence_files.names(files)[0]}"
            if not jax.process_index():
                _copy(source, tower_folder, tower)
            layout = _layout(source, tower, dtype)
            weights = source.family.weights(described(source).config).part(tower)
            safetensors.write_params(tower_folder, params, weights, layout)
            count += len(layout)
            size += safetensors.num_bytes(layout)
            if embeddings[tower].dense:
                map_folder = folder / f"{tower}_{sentence_files.linear_map(files)}"
                if not jax.process_index():
                    map_folder.mkdir(exist_ok=True)
                write_map(map_folder, params, (f"head/{tower}", f"head/{tower}_bias"))
        if not jax.process_index():
            for name, content in sentence_files.routed(routes).items():
                (folder / name).parent.mkdir(exist_ok=True)
                write_json(folder / name, content)
    return {"tensors": count, "bytes": size}


def _layout(source: pretrained.Source, tower: str, dtype: str) -> safetensors.Layout:
    """The layout of the tower's tensors, all in one file."""
    stored = exporter.saved_layout(source)
    weights = source.family.weights(described(source).config).part(tower)
    shapes = {name: tensor.shape for name, tensor in stored.items()}
    spelled = weights.check(shapes, str(source.files))
    layout = {}
    for name, shape in weights.tensors().items():
        kind = exporter.DTYPES.get(dtype, stored[spelled[name]].dtype)
        layout[spelled[name]] = safetensors.Stored(safetensors.SINGLE, kind, shape)
    return layout


def _write_processor(target: pathlib.Path) -> None:
    """Writes an image processor alone; a processor of texts and images would need a tokenizer."""
    combined, images = target / "processor_config.json", target / processor.FILE
    config = pretrained.optional(images) or pretrained.optional(combined).get("image_processor", {})
    config.pop("processor_class", None)
    combined.unlink(missing_ok=True)
    if config:
        write_json(images, config)


def _copy(source: pretrained.Source, target: pathlib.Path, tower: str) -> None:
    """Copies the files of a tower: its config, and its tokenizer or processor."""
    exporter.copy_files(source.files, target)
    exporter.remove_modules(target)
    config: dict[str, Any] = dict(source.hf_config)
    if tower == "vision":
        for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
            (target / name).unlink(missing_ok=True)
        vision = config.get("vision_config") or {}
        vision = vision | (config.get("vision_config_dict") or {})  # in old files, this one wins
        config = vision | {"model_type": _VISION[str(config["model_type"])]}
        _write_processor(target)
    for name in _REPLACED_FILES:
        (target / name).unlink(missing_ok=True)
    config.pop("torch_dtype", None)
    config["dtype"] = "float32"  # a Router does not cast its modules; the maps are float32
    write_json(target / "config.json", config)
