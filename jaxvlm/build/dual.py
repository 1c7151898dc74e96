"""A dual encoder to train: from one checkpoint, of two checkpoints' towers, or from scratch."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from jaxvlm.build import merge, pretrained, record
from jaxvlm.build.described import described
from jaxvlm.build.losses import of_vectors
from jaxvlm.build.model import Model
from jaxvlm.config import ConfigError, DualConfig, TextConfig, TrainConfig, VisionConfig
from jaxvlm.data import images, texts, tokenizer
from jaxvlm.data.processor import Processor
from jaxvlm.io import hf
from jaxvlm.models.families import any_family, sentences
from jaxvlm.types import Params, TextStyle

T = TypeVar("T", VisionConfig, TextConfig)
_WAY = ("dtype", "attention", "lora", "checkpoint", "vision_checkpoint", "text_checkpoint")
"""Fields of a DualConfig that say how it is computed, or where it is from."""
_MULTIPLE = 64
_TOWERS = ("vision", "text")


@dataclasses.dataclass(frozen=True)
class Dual:
    """What a run of a dual encoder is made of."""

    config: DualConfig
    tokenizer: texts.TextTokenizer | None
    pictures: Processor | None
    source: pretrained.Source | None
    """The checkpoint that all of it is from."""
    towers: Mapping[str, pretrained.Source]
    """Tower -> the checkpoint that it is from."""
    of_run: pathlib.Path | None = None
    """The workdir of the run that the vision tower is from."""

    def read_params(self, model: Model, seed: int) -> Params:
        """The first parameters: drawn, those of towers read from their checkpoints.

        Args:
            model: on its mesh.
            seed: of what is drawn: heads, and adapters.
        """
        params = model.draw(seed)
        for tower, source in self.towers.items():
            theirs = source.family.weights(described(source).config).part(tower)
            own = {p: x for p, x in model.base().items() if p.startswith(f"{tower}/")}
            params |= hf.read_params(source.weights, theirs, own)
        if self.of_run:
            own = {p: x for p, x in model.base().items() if p.startswith("vision/")}
            from jaxvlm.io.checkpoint import restore_params  # half a second that a plan has not

            params |= restore_params(self.of_run / "checkpoints", own)
        return model.with_adapters(model.stored(params), seed)


def make(
    config: TrainConfig, workdir: pathlib.Path | None, said: Callable[[], Iterable[str]]
) -> Dual:
    """The dual encoder of a run.

    Args:
        config: of the run.
        workdir: its folder; what it has kept comes first.
        said: the texts of the training data, for a tokenizer that is made.

    Raises:
        ConfigError: settings that a checkpoint contradicts, or that don't go together.
        DataError: a tokenizer or processor that can't be read.
    """
    asked = config.dual
    if asked.checkpoint:
        if asked.vision_checkpoint or asked.text_checkpoint:
            raise ConfigError(
                f"config.dual.checkpoint={asked.checkpoint} is of both towers: leave out "
                "config.dual.vision_checkpoint and text_checkpoint"
            )
        source = _found(asked.checkpoint, workdir)
        seen = described(source)
        made = merged(asked, seen.config)
        return Dual(made, seen.tokenizer, seen.pictures, source, {})
    sources, found, of_run = {}, {}, None
    for tower in _TOWERS:
        if checkpoint := getattr(asked, f"{tower}_checkpoint"):
            if tower not in asked.towers:
                raise ConfigError(
                    f"config.dual.{tower}_checkpoint={checkpoint}, but "
                    f"config.dual.towers={asked.towers}"
                )
            if _is_workdir(checkpoint, tower, workdir):
                of_run = pathlib.Path(checkpoint).expanduser()
                asked = _of_run(asked, tower, of_run, workdir, config.data.resize)
                continue
            sources[tower] = _found(checkpoint, workdir and workdir / tower)
            sentences.check_no_map(pretrained.modules(sources[tower].files))
            found[tower] = described(sources[tower])
            if tower not in found[tower].config.towers:
                raise ConfigError(
                    f"config.dual.{tower}_checkpoint={checkpoint} has no {tower} tower"
                )
    vision, text = asked.vision, asked.text
    if "vision" in found:
        vision = with_tower(vision, found["vision"].config.vision, "vision")
    if "text" in found:
        text = with_tower(text, found["text"].config.text, "text")
    words = None
    if "text" in asked.towers:
        if "text" in found:
            words = found["text"].tokenizer
        else:
            words = _tokenizer(config, workdir, said)
            text = dataclasses.replace(text, vocab_size=_vocab(asked.text, words))
    pictures = None
    if "vision" in asked.towers:
        made_here = None if "vision" in found else _squares(vision, config.data.resize)
        pictures = made_here or found["vision"].pictures
    made = dataclasses.replace(asked, vision=vision, text=text)
    return Dual(made, words, pictures, None, sources, of_run)


def _is_workdir(checkpoint: str, tower: str, workdir: pathlib.Path | None) -> bool:
    """Whether a tower is of a run, not of a Hugging Face checkpoint.

    Args:
        checkpoint: of the tower.
        tower: its name.
        workdir: of the run that takes it, which once begun needs the other no more.
    """
    if workdir is not None and record.is_begun(workdir):
        if (workdir / tower / pretrained.SAVED).is_dir():
            return False
        if not getattr(record.read_config(workdir).dual, f"{tower}_checkpoint"):
            raise ConfigError(
                f"config.dual.{tower}_checkpoint={checkpoint}, but the run in {workdir} began "
                "without one; start in another workdir"
            )
        return True
    folder = pathlib.Path(checkpoint).expanduser()
    return record.is_begun(folder) and not pretrained.is_checkpoint(folder)


def _of_run(
    asked: DualConfig, tower: str, folder: pathlib.Path, workdir: pathlib.Path | None, resize: str
) -> DualConfig:
    """``asked`` with the vision tower of a run that made it from scratch."""
    where = f"config.dual.{tower}_checkpoint={folder}"
    if tower != "vision":
        raise ConfigError(f"{where} is a run; its weights are taken by config.init_from")
    begun = workdir is not None and record.is_begun(workdir)
    run = record.read_config(workdir if begun and workdir is not None else folder)
    found = run.dual
    if run.encoder != "dual" or not of_vectors(run) or "vision" not in found.towers:
        raise ConfigError(f"{where}: that run trained no dual encoder with a vision tower")
    named = found.checkpoint or (not begun and (folder / tower / pretrained.SAVED).is_dir())
    if named or (found.lora.rank and not begun):
        raise ConfigError(
            f"{where}: the run's vision tower is a checkpoint's own, or has adapters; only one "
            "that was made from scratch is taken from a run. Export the run, and name that folder"
        )
    theirs, ours = ("squash" if r == "auto" else r for r in (run.data.resize, resize))
    if theirs != ours and not begun:
        raise ConfigError(f"{where}: config.data.resize must be {theirs!r}, as its")
    return dataclasses.replace(asked, vision=with_tower(asked.vision, found.vision, tower))


def vision_of_run(config: TrainConfig) -> VisionConfig | None:
    """The vision tower that a recipe takes from a run's workdir; ``None``: it takes none."""
    where = pathlib.Path(config.dual.vision_checkpoint).expanduser()
    if not _is_workdir(str(where), "vision", None):
        return None
    return _of_run(config.dual, "vision", where, None, config.data.resize).vision


def _found(checkpoint: str, workdir: pathlib.Path | None) -> pretrained.Source:
    source = pretrained.find(checkpoint, workdir, any_family)
    assert source is not None
    if not hasattr(source.family, "text_style"):
        raise ConfigError(
            f"{checkpoint}: model_type={source.hf_config.get('model_type')!r} is no dual encoder; "
            "a vision-language model is config.encoder='vlm' with config.model.checkpoint"
        )
    return source


def merged(asked: DualConfig, found: DualConfig) -> DualConfig:
    """A checkpoint's model with the recipe's way to compute it."""
    towers = {t: with_tower(getattr(asked, t), getattr(found, t), t) for t in found.towers}
    absent = {t: getattr(asked, t) for t in _TOWERS if t not in found.towers}
    found = dataclasses.replace(found, **towers)
    given = dataclasses.replace(asked, **towers, **absent)
    return merge.merged(given, dataclasses.replace(found, **absent), "config.dual", _WAY)


def with_tower(asked: T, found: T, tower: str) -> T:
    """A checkpoint's tower with the recipe's way to compute it."""
    where, unset = f"config.dual.{tower}", getattr(DualConfig(), tower)
    return merge.merged(asked, found, where, unset=unset)


def _tokenizer(
    config: TrainConfig, workdir: pathlib.Path | None, said: Callable[[], Iterable[str]]
) -> texts.TextTokenizer:
    """The run's own, the one that it names, or a new one of its texts."""
    style = TextStyle(config.dual.text.max_length)
    saved = workdir / "tokenizer" if workdir else None
    if saved is not None and saved.is_dir():
        return texts.load(saved, style)
    asked = config.tokenizer
    if asked.path:
        return texts.load(pathlib.Path(asked.path).expanduser(), style)
    made = tokenizer.build(said(), asked.kind, asked.vocab_size)
    return texts.TextTokenizer(made.backend, style, made.pad_id)


def _vocab(asked: TextConfig, words: texts.TextTokenizer) -> int:
    size = words.backend.get_vocab_size()
    if asked.vocab_size and asked.vocab_size < size:
        raise ConfigError(
            f"config.dual.text.vocab_size={asked.vocab_size} is less than the tokenizer's {size} "
            "tokens; set it to 0 to take the tokenizer's"
        )
    return asked.vocab_size or -(-size // _MULTIPLE) * _MULTIPLE


def _squares(vision: VisionConfig, resize: str) -> Processor:
    """Pictures of a tower from scratch."""
    if vision.packed:
        raise ConfigError(
            "config.dual.vision.packed=True: towers for pictures of any size are started from a "
            "checkpoint"
        )
    prepare = images.squares(vision.image_size, resize)
    return Processor(prepare, vision.image_size, None, vision.pixel_mean, vision.pixel_std)
