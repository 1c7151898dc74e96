"""What a sentence-transformers folder says besides its ``config.json``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxvlm.config import ConfigError, DualConfig
from jaxvlm.models.families.fields import Fields, read
from jaxvlm.types import TextStyle

_POOLS = {"cls": "class", "mean": "mean", "lasttoken": "last"}
"""sentence-transformers' name -> ours."""
_OLD_POOLS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_POOLING = Fields(
    {"pooling_mode": None, "embedding_dimension": None, "word_embedding_dimension": None}
    | dict.fromkeys(_OLD_POOLS, False),
    {"include_prompt": (True,)},
    frozenset(),
)


def with_modules(
    config: DualConfig, modules: Sequence[Mapping[str, Any]], pooling: Mapping[str, Any]
) -> DualConfig:
    """``config`` with what a sentence-transformers folder puts behind the encoder.

    Args:
        config: of the encoder.
        modules: the content of ``modules.json``.
        pooling: the content of the pooling module's ``config.json``.

    Raises:
        ConfigError: a module or a way of pooling that jaxvlm does not have.
    """
    kinds = [str(module.get("type", "")).rsplit(".", 1)[-1] for module in modules]
    if kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in ([], ["Normalize"]):
        raise ConfigError(
            f"modules.json: {', '.join(kinds)} is not supported, only Transformer, Pooling and "
            "perhaps Normalize"
        )
    where = "the pooling module's config.json: "
    said = read(pooling, _POOLING, where)
    for name in ("embedding_dimension", "word_embedding_dimension"):
        if said[name] not in (None, config.text.width):
            raise ConfigError(f"{where}{name}={said[name]}, but hidden_size={config.text.width}")
    mode = said["pooling_mode"] or [_OLD_POOLS[n] for n in _OLD_POOLS if said[n]] or "mean"
    modes = [mode] if isinstance(mode, str) else list(mode)
    if len(modes) != 1 or modes[0] not in _POOLS:
        raise ConfigError(
            f"{where}pooling by {' and '.join(modes)} is not supported, only by one of "
            f"{', '.join(_POOLS)}"
        )
    text = dataclasses.replace(config.text, pool=_POOLS[modes[0]])
    return dataclasses.replace(config, text=text, normalize="Normalize" in kinds)


def with_settings(
    style: TextStyle, first: Mapping[str, Any], whole: Mapping[str, Any]
) -> TextStyle:
    """``style`` with what sentence-transformers says of texts.

    Args:
        style: of the encoder's family.
        first: the content of ``sentence_bert_config.json``, perhaps empty.
        whole: of ``config_sentence_transformers.json``.

    Raises:
        ConfigError: a field that is unknown here, or a value that jaxvlm can't do.
    """
    said = read(first, _FIRST, "sentence_bert_config.json: ")
    read(whole, _WHOLE, "config_sentence_transformers.json: ")
    length = min(style.max_length, said["max_seq_length"] or style.max_length)
    return style._replace(
        max_length=length, clean=str.lower if said["do_lower_case"] else style.clean
    )


_OUTPUT = {"method": "forward", "method_output_name": "last_hidden_state"}
_FIRST = Fields(
    {"max_seq_length": None, "do_lower_case": False},
    {
        "transformer_task": ("feature-extraction",),
        "modality_config": ({"text": _OUTPUT},),
        "module_output_name": ("token_embeddings",),
    },
    frozenset(),
)
_WHOLE = Fields(
    {},
    {"default_prompt_name": (None,), "model_type": ("SentenceTransformer",)},
    # Prompts are for those who ask for one by its name.
    frozenset(("__version__", "prompts", "similarity_fn_name")),
)
