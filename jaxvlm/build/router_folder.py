"""A run of two towers of two checkpoints as a folder that sentence-transformers loads."""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxvlm.build import exporting, pretrained
from jaxvlm.build.described import described
from jaxvlm.build.encoder import Encoder
from jaxvlm.config import ConfigError
from jaxvlm.data import processor
from jaxvlm.io import hf
from jaxvlm.models.families import any_family, sentence_files
from jaxvlm.models.families.sentence_files import Vectors
from jaxvlm.types import Params

_VISION = {"clip": "clip_vision_model", "siglip": "siglip_vision_model"}
"""``model_type`` of a checkpoint -> of its vision tower alone."""
_TEXT = ("bert",)
_OTHERS = ("modules.json", "config_sentence_transformers.json", "config.json")
WriteMap = Callable[[pathlib.Path, Params, tuple[str, str]], None]


def sources(model: Encoder, workdir: pathlib.Path, flag: str) -> dict[str, pretrained.Source]:
    """The checkpoints of both towers, in what a run has kept of them.

    Args:
        model: the run's.
        workdir: of the run.
        flag: what error messages call the folder.

    Raises:
        ConfigError: a tower has none, or sentence-transformers has no such tower alone.
    """
    found, config = {}, model.model.config
    for tower, kinds in (("text", _TEXT), ("vision", tuple(_VISION))):
        named = getattr(config, f"{tower}_checkpoint")
        kept = (workdir / tower / pretrained.SAVED / pretrained.LAYOUT).is_file()
        source = pretrained.find(named, workdir / tower, any_family) if named and kept else None
        kind = source.hf_config.get("model_type") if source else "none"
        if source is None or kind not in kinds:
            raise ConfigError(
                f"{flag}: the run in {workdir} is not of one checkpoint (config.dual.checkpoint), "
                f"and its {tower} tower's is {kind}; of two towers sentence-transformers has a "
                f"place for {' or '.join(kinds)} (config.dual.{tower}_checkpoint)"
            )
        found[tower] = source
    return found


def write(
    model: Encoder,
    found: dict[str, pretrained.Source],
    output: pathlib.Path,
    vectors: dict[str, Vectors],
    first: dict[str, Any],
    dtype: str,
    write_map: WriteMap,
) -> dict[str, Any]:
    """Write both towers, a route each, by what an item is.

    Args:
        model: the run's.
        found: of :func:`sources`.
        output: a new folder.
        vectors: of each tower, how its states become vectors.
        first: what is said of the inputs of texts; see ``sentence_files.inputs``.
        dtype: of weights; "" is each tensor's own in the source.
        write_map: writes a linear map.

    Returns:
        How many ``tensors`` and ``bytes`` were written.
    """
    exporting.check_output(output, dtype)
    params = model.model.merged(model.params) if model.model.adapted else model.params
    inputs = {"text": first, "vision": sentence_files.SEEN}
    routes, count, size = {}, 0, 0
    with exporting.new_folder(output) as half:
        for tower, source in found.items():
            kind = str(source.hf_config["model_type"])
            files = sentence_files.files(_VISION.get(kind, kind), vectors[tower], inputs[tower])
            routes[tower] = files
            there = half / f"{tower}_{sentence_files.names(files)[0]}"
            if not jax.process_index():
                _copy(source, there, tower)
            layout = _layout(source, tower, dtype)
            weights = source.family.weights(described(source).config).part(tower)
            hf.write_params(there, params, weights, layout)
            count += len(layout)
            sizes = (np.prod(s.shape) * hf.DTYPES[s.dtype].itemsize for s in layout.values())
            size += int(sum(sizes))
            if vectors[tower].dense:
                folder = half / f"{tower}_{sentence_files.linear_map(files)}"
                if not jax.process_index():
                    folder.mkdir(exist_ok=True)
                write_map(folder, params, (f"head/{tower}", f"head/{tower}_bias"))
        if not jax.process_index():
            for name, content in sentence_files.routed(routes).items():
                (half / name).parent.mkdir(exist_ok=True)
                text = json.dumps(content, indent=2) + "\n"
                (half / name).write_text(text, encoding="utf-8")
    return {"tensors": count, "bytes": size}


def _layout(source: pretrained.Source, tower: str, dtype: str) -> hf.Layout:
    """The tower's tensors, in one file."""
    stored = pretrained.json_object(source.files / pretrained.LAYOUT)
    weights = source.family.weights(described(source).config).part(tower)
    shapes = {name: tuple(shape) for name, (_, _, shape) in stored.items()}
    spelled = weights.check(shapes, str(source.files))
    return {
        spelled[name]: hf.Stored(
            hf.SINGLE, exporting.DTYPES.get(dtype, stored[spelled[name]][1]), shape
        )
        for name, shape in weights.tensors().items()
    }


def _write_processor(target: pathlib.Path) -> None:
    """How pictures alone are prepared: a processor of texts too would want a tokenizer."""
    whole, own = target / "processor_config.json", target / processor.FILE
    said = pretrained.optional(own) or pretrained.optional(whole).get("image_processor", {})
    said.pop("processor_class", None)
    whole.unlink(missing_ok=True)
    if said:
        own.write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")


def _copy(source: pretrained.Source, target: pathlib.Path, tower: str) -> None:
    """What the checkpoint says of a tower: its config, tokenizer or processor."""
    exporting.copy_files(source.files, target)
    for module in pretrained.modules(target):
        if module.get("path"):
            shutil.rmtree(target / module["path"], ignore_errors=True)
    config: dict[str, Any] = dict(source.hf_config)
    if tower == "vision":
        for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
            (target / name).unlink(missing_ok=True)
        own = config.get("vision_config") or {}
        own = own | (config.get("vision_config_dict") or {})  # an old file's has the last word
        config = own | {"model_type": _VISION[str(config["model_type"])]}
        _write_processor(target)
    for name in _OTHERS:
        (target / name).unlink(missing_ok=True)
    config.pop("torch_dtype", None)
    config["dtype"] = "float32"  # a Router brings its modules to no common dtype; maps are float32
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
