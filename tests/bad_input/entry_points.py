"""What a command does with an input before it trains or computes: the same functions."""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

from jaxvlm.checkpoint.checkpointer import CheckpointError
from jaxvlm.config import Config, ConfigError, DataConfig, from_config_dict
from jaxvlm.config import to_config_dict as to_dict
from jaxvlm.data import validate
from jaxvlm.data.conversations import tokenize
from jaxvlm.data.errors import DataError, ImageError
from jaxvlm.data.images import image_files
from jaxvlm.data.sources import pair_formats
from jaxvlm.data.sources.conversation_formats import Turn
from jaxvlm.data.tokenizer import chat_tokenizer
from jaxvlm.hf import encoder_folder, pretrained, run_processor, safetensors
from jaxvlm.hf.families import ENCODERS, any_family
from tests.bad_input import data_files, folders

REFUSALS = (ConfigError, DataError, CheckpointError, FileNotFoundError, ImageError)
"""Errors that the command line prints as one line."""
Enter = Callable[[str, bytes], Any]
"""(file, content) -> what was refused in it, or nothing; raises one of ``REFUSALS``."""


def prepare(kind: str, folder: pathlib.Path) -> Enter:
    """The entry point of a kind of input; ``folder`` is for its files."""
    if kind == "override":
        return override
    data_files.write_images(folder)
    if kind in ("conversations", "image"):
        return lambda file, data: _data_check(folder, file, data)
    if kind in ("pairs", "tables", "tar"):
        return lambda file, data: _pairs(folder, file, data)
    good = {}
    for config in (folders.LLAVA, folders.QWEN, folders.BERT):
        name = config["model_type"]
        good[name] = folder / name
        good[name].mkdir()
        folders.write_good(good[name], config)
    return lambda file, data: _folder(folder, good, file, data)


def _data_check(folder: pathlib.Path, file: str, data: bytes) -> Any:
    """``jaxvlm data check``, of a file of conversations or of an image that a record names."""
    (folder / file).write_bytes(data)
    if not file.startswith("data."):
        record = json.dumps(data_files.CONVERSATION | {"image": file})
        (folder / "data.jsonl").write_text(record)
        file = "data.jsonl"
    report = validate.validate(str(folder / file), DataConfig(), prepare=image_files.squares(16))
    json.dumps(report.to_dict())
    return "\n".join(report.lines()).encode("utf-8", "backslashreplace") if report.problems else ""


def _pairs(folder: pathlib.Path, file: str, data: bytes) -> Any:
    """The reading of pairs, and of the images that they name."""
    (folder / file).write_bytes(data)
    examples, problems = pair_formats.read(str(folder / file))
    refused = [str(problem) for problem in problems]
    for example in examples:
        for item in (example.query, example.positive, *example.negatives):
            if item.image:
                try:
                    image_files.load(item.image, image_files.squares(16))
                except ImageError as error:
                    refused.append(str(error))
    return refused


def _folder(folder: pathlib.Path, good: Any, file: str, data: bytes) -> Any:
    """The loading of a Hugging Face folder in ``eval``, ``generate`` and ``embed``."""
    bad = folder / "bad"
    shutil.rmtree(bad, ignore_errors=True)
    name = next((name for name in good if f'"{name}"'.encode() in data), "llava")
    name = "qwen2_5_vl" if b"Qwen2VL" in data else name
    shutil.copytree(good[name], bad)
    (bad / file).write_bytes(data)
    pretrained.is_checkpoint(bad)
    source = pretrained.find(str(bad), choose=any_family)
    assert source is not None
    if source.family in ENCODERS.values():
        encoder_folder.described(source)
    else:
        config = pretrained.with_source(Config(), source)
        style = source.family.chat_style(source.hf_config)
        tokenizer = chat_tokenizer.load(source.files, style)
        pretrained.check_tokens(source, tokenizer)
        image = run_processor.image_format_of(config, source, tokenizer)
        image.of_size(30, 20)
        tokenize.prompt_ids([Turn("user", "<image>what is it?")], tokenizer)
        image_files.load(str(folder / "good.png"), image.prepare)
    if (bad / safetensors.INDEX).is_file() or (bad / safetensors.SINGLE).is_file():
        safetensors.read_layout(bad)


def override(file: str, data: bytes) -> Any:
    """``--config.NAME=VALUE``."""
    name, value = json.loads(data)
    config = to_dict(Config())
    *groups, last = name.split(".")
    group = config
    for part in groups:
        group = group[part]
    try:
        group[last] = value
    except (TypeError, ValueError, KeyError) as error:  # ml_collections', which the flags print
        raise ConfigError(str(error)) from None
    from_config_dict(config)
