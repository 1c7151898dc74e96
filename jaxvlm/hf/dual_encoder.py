"""Dual encoders to train: from one checkpoint, from two checkpoints' towers, or from scratch."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from jaxvlm.checkpoint import run_record
from jaxvlm.config import Config, ConfigError, DualConfig, TextConfig, VisionConfig, merge
from jaxvlm.data.images import image_files
from jaxvlm.data.images.processor import Processor
from jaxvlm.data.tokenizer import chat_tokenizer, text_tokenizer
from jaxvlm.hf import pretrained, run_processor, safetensors
from jaxvlm.hf.encoder_folder import described
from jaxvlm.hf.families import any_family, sentences
from jaxvlm.losses.registry import trains_embeddings
from jaxvlm.spmd.model import Model
from jaxvlm.types import Params, TextStyle

T = TypeVar("T", VisionConfig, TextConfig)
_RECIPE_FIELDS = (
    "dtype",
    "attention",
    "lora",
    "checkpoint",
    "vision_checkpoint",
    "text_checkpoint",
)
"""Settings of a DualConfig that a recipe may set although a checkpoint is given."""
_MULTIPLE = 64
_TOWERS = ("vision", "text")


@dataclasses.dataclass(frozen=True)
class DualEncoderSource:
    """Config, tokenizer, image processor and weights that a dual encoder's run starts from."""

    config: DualConfig
    tokenizer: text_tokenizer.TextTokenizer | None
    image_processor: Processor | None
    source: pretrained.Source | None
    """Checkpoint of the whole model."""
    towers: Mapping[str, pretrained.Source]
    """Tower -> its checkpoint."""
    of_run: pathlib.Path | None = None
    """Workdir of the run that the vision tower comes from."""

    def read_params(self, model: Model, seed: int) -> Params:
        """Read the towers' parameters from their checkpoints, and initialize all others.

        Args:
            model: the model on its mesh.
            seed: seed of initial heads and adapters.
        """
        params = model.draw(seed)
        for tower, source in self.towers.items():
            name_map = source.family.weights(described(source).config).part(tower)
            abstract = {p: x for p, x in model.base().items() if p.startswith(f"{tower}/")}
            params |= safetensors.read_params(source.weights, name_map, abstract)
        if self.of_run:
            abstract = {p: x for p, x in model.base().items() if p.startswith("vision/")}
            from jaxvlm.checkpoint.checkpointer import (
                restore_params,  # importing it takes half a second, which the planner saves
            )

            params |= restore_params(run_record.checkpoints_of(self.of_run), abstract)
        return model.with_adapters(model.stored(params), seed)


def make_dual_encoder(
    config: Config, workdir: pathlib.Path | None, texts: Callable[[], Iterable[str]]
) -> DualEncoderSource:
    """Find the config, tokenizer, image processor and weights of a dual encoder's run.

    Args:
        config: settings of the run.
        workdir: the run's folder; copies of checkpoint files in it take precedence.
        texts: returns the texts of the training data, to train a tokenizer on.

    Raises:
        ConfigError: settings that contradict a checkpoint, or each other.
        DataError: a tokenizer or processor that can't be read.
    """
    given = config.dual
    if given.checkpoint:
        if given.vision_checkpoint or given.text_checkpoint:
            raise ConfigError(
                f"config.dual.checkpoint={given.checkpoint} has both towers: leave out "
                "config.dual.vision_checkpoint and text_checkpoint"
            )
        source = _find_source(given.checkpoint, workdir)
        folder = described(source)
        _check_resizing(config, folder.image_processor)
        dual = merged(given, folder.config)
        return DualEncoderSource(dual, folder.tokenizer, folder.image_processor, source, {})
    sources, folders, of_run = {}, {}, None
    for tower in _TOWERS:
        if checkpoint := getattr(given, f"{tower}_checkpoint"):
            if tower not in given.towers:
                raise ConfigError(
                    f"config.dual.{tower}_checkpoint={checkpoint}, but "
                    f"config.dual.towers={given.towers}; add {tower!r} there, or leave it out"
                )
            if _is_workdir(checkpoint, tower, workdir):
                of_run = pathlib.Path(checkpoint).expanduser()
                given = _with_tower_of_run(given, tower, of_run, workdir, config.data.resize)
                continue
            sources[tower] = _find_source(checkpoint, workdir, tower)
            sentences.check_no_map(pretrained.modules(sources[tower].files))
            folders[tower] = described(sources[tower])
            if tower not in folders[tower].config.towers:
                raise ConfigError(
                    f"config.dual.{tower}_checkpoint={checkpoint} has no {tower} tower; name a "
                    "checkpoint that has one, or leave it out"
                )
    vision, text = given.vision, given.text
    if "vision" in folders:
        vision = with_tower(vision, folders["vision"].config.vision, "vision")
    if "text" in folders:
        text = with_tower(text, folders["text"].config.text, "text")
    tokenizer = None
    if "text" in given.towers:
        if "text" in folders:
            tokenizer = folders["text"].tokenizer
        else:
            tokenizer = _tokenizer(config, workdir, texts)
            text = dataclasses.replace(text, vocab_size=_vocab(given.text, tokenizer))
    processor = None
    if "vision" in given.towers:
        squares = None if "vision" in folders else _squares(vision, config.data.resize)
        processor = squares or folders["vision"].image_processor
        _check_resizing(config, None if squares else processor)
    dual = dataclasses.replace(given, vision=vision, text=text)
    return DualEncoderSource(dual, tokenizer, processor, None, sources, of_run)


def _check_resizing(config: Config, of_checkpoint: Processor | None) -> None:
    """Refuse settings of how images are resized that are not read.

    Args:
        config: settings of the run.
        of_checkpoint: the checkpoint's image processor; ``None`` if there is none.
    """
    data = config.data
    if any(data.image_pixels_range):
        raise ConfigError(
            f"config.data.image_pixels_range={data.image_pixels_range}: a dual encoder's images "
            "are resized as its image processor or config.dual.vision says; leave it out"
        )
    if of_checkpoint is not None and data.resize != "auto":
        raise ConfigError(
            f"config.data.resize={data.resize!r}: images are resized as the image processor of the "
            "vision encoder's checkpoint says; leave it out"
        )


def _is_workdir(checkpoint: str, tower: str, workdir: pathlib.Path | None) -> bool:
    """Return whether a tower comes from a run's workdir, not from a Hugging Face checkpoint.

    Args:
        checkpoint: the tower's checkpoint setting.
        tower: its name.
        workdir: workdir of the run that uses the tower; once it has weights, it no longer needs the
            other workdir.
    """
    if workdir is not None and run_record.has_checkpoint(workdir):
        if (workdir / tower / pretrained.SAVED).is_dir():
            return False
        if not getattr(run_record.read_config(workdir).dual, f"{tower}_checkpoint"):
            raise ConfigError(
                f"config.dual.{tower}_checkpoint={checkpoint}, but the run in {workdir} began "
                "without one; start in another workdir"
            )
        return True
    folder = pathlib.Path(checkpoint).expanduser()
    return run_record.is_begun(folder) and not pretrained.is_checkpoint(folder)


def _with_tower_of_run(
    given: DualConfig, tower: str, folder: pathlib.Path, workdir: pathlib.Path | None, resize: str
) -> DualConfig:
    """Return ``given`` with the vision tower of a run that trained it from scratch."""
    where = f"config.dual.{tower}_checkpoint={folder}"
    if tower != "vision":
        raise ConfigError(f"{where} is a run; use config.init_from to start from its weights")
    begun = workdir is not None and run_record.has_checkpoint(workdir)
    run = run_record.read_config(workdir if begun and workdir is not None else folder)
    dual = run.dual
    if run.embedder != "dual" or not trains_embeddings(run) or "vision" not in dual.towers:
        raise ConfigError(
            f"{where}: that run trained no dual encoder with a vision tower; name one that did"
        )
    has_saved_tower = (folder / tower / pretrained.SAVED).is_dir()
    pretrained_tower = dual.checkpoint or (not begun and has_saved_tower)
    if pretrained_tower or (dual.lora.rank and not begun):
        raise ConfigError(
            f"{where}: the run's vision tower started from a checkpoint, or has adapters; only a "
            "vision tower trained from scratch can be taken from a workdir. Export the run, and "
            "name the exported folder"
        )
    theirs, ours = ("squash" if r == "auto" else r for r in (run.data.resize, resize))
    if theirs != ours and not begun:
        raise ConfigError(f"{where}: config.data.resize must be {theirs!r}, as in that run")
    return dataclasses.replace(given, vision=with_tower(given.vision, dual.vision, tower))


def vision_of_run(config: Config) -> VisionConfig | None:
    """Return the vision tower that a recipe takes from a run's workdir, or ``None``."""
    folder = pathlib.Path(config.dual.vision_checkpoint).expanduser()
    if not _is_workdir(str(folder), "vision", None):
        return None
    return _with_tower_of_run(config.dual, "vision", folder, None, config.data.resize).vision


def _find_source(
    checkpoint: str, workdir: pathlib.Path | None, tower: str = ""
) -> pretrained.Source:
    source = pretrained.find(checkpoint, workdir, any_family, tower)
    assert source is not None
    if not hasattr(source.family, "text_style"):
        raise ConfigError(
            f"{checkpoint}: model_type={source.hf_config.get('model_type')!r} is no dual encoder; "
            "a vision-language model is config.embedder='vlm' with config.model.checkpoint"
        )
    return source


def merged(given: DualConfig, checkpoint: DualConfig) -> DualConfig:
    """Combine a checkpoint's dims with a recipe's settings of how the model is computed."""
    own = checkpoint.towers
    towers = {t: with_tower(getattr(given, t), getattr(checkpoint, t), t) for t in own}
    absent = {t: getattr(given, t) for t in _TOWERS if t not in own}
    checkpoint = dataclasses.replace(checkpoint, **towers, **absent)
    given = dataclasses.replace(given, **towers, **absent)
    return merge.merged(given, checkpoint, "config.dual", _RECIPE_FIELDS)


def with_tower(given: T, checkpoint: T, tower: str) -> T:
    """Combine a checkpoint's tower with a recipe's settings of how it is computed."""
    where, unset = f"config.dual.{tower}", getattr(DualConfig(), tower)
    return merge.merged(given, checkpoint, where, unset=unset)


def _tokenizer(
    config: Config, workdir: pathlib.Path | None, texts: Callable[[], Iterable[str]]
) -> text_tokenizer.TextTokenizer:
    """Load the run's tokenizer, or the one that it names, or train one on its texts."""
    style = TextStyle(config.dual.text.max_length)
    saved = workdir / "tokenizer" if workdir else None
    folder = run_processor.tokenizer_folder(config, saved)
    if folder is not None:
        return text_tokenizer.load(folder, style)
    settings = config.tokenizer
    trained = chat_tokenizer.build(texts(), settings.kind, settings.vocab_size)
    return text_tokenizer.TextTokenizer(trained.backend, style, trained.pad_id)


def _vocab(text: TextConfig, tokenizer: text_tokenizer.TextTokenizer) -> int:
    size = tokenizer.backend.get_vocab_size()
    run_processor.check_vocab("", "config.dual.text.vocab_size", text.vocab_size, size)
    return text.vocab_size or -(-size // _MULTIPLE) * _MULTIPLE


def _squares(vision: VisionConfig, resize: str) -> Processor:
    """Return the image processor of a vision tower trained from scratch."""
    if vision.packed:
        raise ConfigError(
            "config.dual.vision.packed=True: vision towers for images of any size must start from "
            "a checkpoint, config.dual.checkpoint or config.dual.vision_checkpoint"
        )
    prepare = image_files.squares(vision.image_size, resize)
    return Processor(prepare, vision.image_size, None, vision.pixel_mean, vision.pixel_std)
