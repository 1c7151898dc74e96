"""How a model embeds queries and documents, as it was trained: their instruction and length."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxvlm.config import Config, ConfigError
from jaxvlm.hf import pretrained
from jaxvlm.hf.pretrained import Source, sentence_settings
from jaxvlm.losses.registry import trains_embeddings

NAMES = ("query", "document")
_FOLDER_NAMES = {"query": ("query",), "document": ("document", "passage", "corpus")}
"""Names of the prompts that sentence-transformers takes for queries and for documents."""


class InputType(NamedTuple):
    """How a model embeds the items of one type."""

    instruction: str = ""
    """Instruction for items that have none of their own."""
    max_length: int = 0
    """Maximum number of tokens of an item, whose text is truncated; 0: the model's own limit."""


def of(source: Source | None, run: Config | None) -> dict[str, InputType]:
    """Returns the input types of a run, or of the folder ``source`` if there is no run."""
    if run is not None or source is None:
        return of_run(run)
    return of_folder(sentence_settings(source))


def of_run(config: Config | None) -> dict[str, InputType]:
    """Returns the input types of a run that trains embeddings; {} for all other models."""
    if config is None or not trains_embeddings(config):
        return {}
    pairs = config.data.pairs
    return {
        name: InputType(
            getattr(pairs, f"{name}_instruction"),
            getattr(pairs, f"max_{name}_length") or config.data.max_length,
        )
        for name in NAMES
    }


def of_folder(settings: Mapping[str, Any]) -> dict[str, InputType]:
    """Returns the input types of a sentence-transformers folder: its prompts.

    Args:
        settings: content of its ``config_sentence_transformers.json``; {} if there is none.

    Raises:
        ConfigError: its prompts are no texts, or its default is none of them.
    """
    prompts = settings.get("prompts") or {}
    is_text = isinstance(prompts, dict) and all(isinstance(p, str) for p in prompts.values())
    if not is_text:
        raise ConfigError("config_sentence_transformers.json: prompts must map names to texts")
    default = settings.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise ConfigError(
            f"config_sentence_transformers.json: default_prompt_name={default!r} is none of its "
            f"prompts, {', '.join(prompts) or 'of which it has none'}"
        )
    types = {}
    for name, candidates in _FOLDER_NAMES.items():
        found = next((c for c in (*candidates, default) if c in prompts), None)
        if found is not None and prompts[found]:
            types[name] = InputType(prompts[found])
    return types


def similarity_of_folder(settings: Mapping[str, Any]) -> str:
    """Returns how embeddings of a sentence-transformers folder are compared: ``cosine`` or ``dot``.

    Args:
        settings: content of its ``config_sentence_transformers.json``; {} if there is none.

    Raises:
        ConfigError: in another way.
    """
    name = settings.get("similarity_fn_name") or "cosine"  # sentence-transformers' default
    if name not in ("cosine", "dot"):
        raise ConfigError(
            f"config_sentence_transformers.json: similarity_fn_name={name!r} is not supported, "
            "only 'cosine' and 'dot'"
        )
    return str(name)


def lines_of_folder(settings: Mapping[str, Any], run: Config) -> list[str]:
    """Says what a run does otherwise than the sentence-transformers folder that it starts from.

    Args:
        settings: content of its ``config_sentence_transformers.json``; {} if there is none.
        run: settings of the run.
    """
    own, lines = of_run(run), []
    for name, given in of_folder(settings).items():
        if given.instruction != own[name].instruction:
            lines.append(
                f"the folder's prompt for each {name} is {given.instruction!r}, and this run's "
                f"config.data.pairs.{name}_instruction {own[name].instruction!r}"
            )
    similarity = settings.get("similarity_fn_name") or "cosine"
    if settings and similarity != run.pair_loss.similarity:
        lines.append(
            f"the folder compares embeddings by similarity_fn_name={similarity!r}, and this run by "
            f"config.pair_loss.similarity={run.pair_loss.similarity!r}"
        )
    return lines


def check_same_as_folder(files: pathlib.Path, run: Config, length: int = 0) -> None:
    """Checks that a copy of a sentence-transformers folder's files says what a run was trained by.

    Args:
        files: the folder's files, of which transformers reads none of those that say it.
        run: settings of the run.
        length: maximum number of tokens of a text in the folder; 0: it has none.

    Raises:
        ConfigError: they do not; the message names the first difference.
    """
    if not trains_embeddings(run) or not pretrained.modules(files):
        return
    settings = pretrained.optional(files / "config_sentence_transformers.json")
    lines = lines_of_folder(settings, run)
    for name, own in of_run(run).items():
        if own.max_length < length:
            lines.append(
                f"the folder truncates texts to {length} tokens, and this run each {name} to "
                f"{own.max_length}"
            )
    if lines:
        raise ConfigError(
            "an export in Hugging Face's format keeps the files of the sentence-transformers "
            f"folder that the run began from, and {lines[0]}; --format=sentence_transformers "
            "writes the run's own, and transformers loads that folder too"
        )


def choose(
    own_types: Mapping[str, InputType], name: str, instruction: str | None = None
) -> InputType:
    """Chooses how items are embedded.

    Args:
        own_types: ``input_types`` of the model that embeds them.
        name: ``query``, ``document``, or "" if the model embeds both in the same way.
        instruction: instruction that replaces the model's own; ``None`` for its own.

    Raises:
        ConfigError: ``name`` is "", but the model embeds queries and documents differently.
    """
    types = {n: own_types.get(n, InputType()) for n in NAMES}
    if instruction is not None:
        types = {n: own._replace(instruction=instruction) for n, own in types.items()}
    if name:
        return types[name]
    query, document = types["query"], types["document"]
    if query != document:
        differ = [
            f"the {field} of queries is {a!r}, that of documents {b!r}"
            for field, a, b in zip(InputType._fields, query, document, strict=True)
            if a != b
        ]
        raise ConfigError(
            f"the model embeds queries and documents differently ({'; '.join(differ)}); say which "
            "these are with --input_type=query or --input_type=document"
        )
    return query
