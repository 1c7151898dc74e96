"""What a sentence-transformers folder says besides its ``config.json``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxvlm.config import ConfigError, DualConfig
from jaxvlm.models.families.fields import Fields, read
from jaxvlm.models.families.names import Entry, NameMap
from jaxvlm.types import TextStyle

DENSE = "Dense"
"""The module of a linear map."""
POOLS = {"cls": "class", "mean": "mean", "lasttoken": "last"}
"""sentence-transformers' name -> ours."""
OLD_POOLS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_POOLING = Fields(
    {"pooling_mode": None, "embedding_dimension": None, "word_embedding_dimension": None}
    | dict.fromkeys(OLD_POOLS, False),
    {"include_prompt": (True,)},
    frozenset(),
)

_DENSE = Fields(
    {
        "in_features": None,
        "out_features": None,
        "bias": True,
        "activation_function": "torch.nn.modules.activation.Tanh",
    },
    {
        "module_input_name": ("sentence_embedding",),
        "module_output_name": ("sentence_embedding",),
        "use_residual": (False,),
    },
    frozenset(),
)


def kinds_of(modules: Sequence[Mapping[str, Any]]) -> list[str]:
    """What each module of ``modules.json`` is: ``Transformer``, ``Pooling``, …"""
    return [str(module.get("type", "")).rsplit(".", 1)[-1] for module in modules]


def place(modules: Sequence[Mapping[str, Any]], kind: str) -> str:
    """The folder of the first module of a kind; "" where there is none."""
    paths = (module.get("path", "") for module in modules)
    found = (path for path, k in zip(paths, kinds_of(modules), strict=True) if k == kind)
    return next(found, "")


def with_modules(
    config: DualConfig,
    modules: Sequence[Mapping[str, Any]],
    pooling: Mapping[str, Any],
    dense: Mapping[str, Any],
) -> DualConfig:
    """``config`` with what a sentence-transformers folder puts behind the encoder.

    Args:
        config: of the encoder.
        modules: the content of ``modules.json``.
        pooling: the content of the pooling module's ``config.json``.
        dense: of the linear map's, where there is one.

    Raises:
        ConfigError: a module or a way of pooling that jaxvlm does not have.
    """
    kinds = kinds_of(modules)
    behind = ("", "Normalize", DENSE, f"{DENSE} Normalize")
    if kinds[:2] != ["Transformer", "Pooling"] or " ".join(kinds[2:]) not in behind:
        raise ConfigError(
            f"modules.json: {', '.join(kinds)} is not supported, only Transformer, Pooling, and "
            "perhaps Dense and Normalize"
        )
    text = dataclasses.replace(config.text, pool=_pool(pooling, config.text.width))
    config = dataclasses.replace(config, text=text, normalize="Normalize" in kinds)
    return _with_map(config, dense) if DENSE in kinds else config


def _with_map(config: DualConfig, dense: Mapping[str, Any]) -> DualConfig:
    """``config`` with the linear map of a Dense module."""
    where, width = "the Dense module's config.json: ", config.text.width
    said = read(dense, _DENSE, where)
    if said["in_features"] != width or not said["out_features"]:
        raise ConfigError(
            f"{where}in_features={said['in_features']}, out_features={said['out_features']}; it "
            f"stands behind {width} dims"
        )
    if str(said["activation_function"]).rsplit(".", 1)[-1] != "Identity":
        raise ConfigError(
            f"{where}activation_function={said['activation_function']} is not supported, only "
            "torch.nn.modules.linear.Identity"
        )
    out, bias = said["out_features"], bool(said["bias"])
    return dataclasses.replace(config, embed_dim=out, project=("text",), project_bias=bias)


def linear_map(config: DualConfig) -> NameMap:
    """The tensors of a Dense module.

    Args:
        config: of :func:`with_modules`.
    """
    entries = [Entry("head/text", "linear.weight", "D E", "E D")]
    if config.project_bias:
        entries.append(Entry("head/text_bias", "linear.bias", "E", "E"))
    return NameMap(entries, {"D": config.text.width, "E": config.embed_dim}, {})


def _pool(pooling: Mapping[str, Any], width: int) -> str:
    """Our name of how a pooling module's ``config.json`` pools states of ``width`` dims."""
    where = "the pooling module's config.json: "
    said = read(pooling, _POOLING, where)
    for name in ("embedding_dimension", "word_embedding_dimension"):
        if said[name] not in (None, width):
            raise ConfigError(f"{where}{name}={said[name]}, but hidden_size={width}")
    mode = said["pooling_mode"] or [OLD_POOLS[n] for n in OLD_POOLS if said[n]] or "mean"
    modes = [mode] if isinstance(mode, str) else list(mode)
    if len(modes) != 1 or modes[0] not in POOLS:
        raise ConfigError(
            f"{where}pooling by {' and '.join(modes)} is not supported, only by one of "
            f"{', '.join(POOLS)}"
        )
    return POOLS[modes[0]]


def check_whole(modules: Sequence[Mapping[str, Any]]) -> None:
    """Refuse modules behind a model of pictures and texts whose heads make unit vectors.

    Raises:
        ConfigError: which.
    """
    if (kinds := kinds_of(modules))[1:] not in ([], ["Normalize"]):
        raise ConfigError(
            f"modules.json: {', '.join(kinds)} is not supported for this model, only "
            "Transformer or CLIPModel and perhaps Normalize"
        )


def check_last(
    modules: Sequence[Mapping[str, Any]], pooling: Mapping[str, Any], width: int
) -> None:
    """Refuse modules that make another vector than the unit one of a decoder's last token.

    Args:
        modules: the content of ``modules.json``.
        pooling: of the pooling module's ``config.json``.
        width: of the decoder.

    Raises:
        ConfigError: which.
    """
    kinds = kinds_of(modules)
    if kinds != ["Transformer", "Pooling", "Normalize"] or _pool(pooling, width) != "last":
        raise ConfigError(
            f"modules.json: {', '.join(kinds)} with this pooling is not supported for a "
            "vision-language model, only Transformer, Pooling by lasttoken and Normalize; load the "
            "run that it is of"
        )


def check_no_map(modules: Sequence[Mapping[str, Any]]) -> None:
    """Refuse to train on with vectors whose linear map would be left behind.

    Raises:
        ConfigError: there is one.
    """
    if DENSE in kinds_of(modules):
        raise ConfigError(
            "modules.json: the folder's Dense module is not read, and a new one would stand in its "
            "place; go on from the run that it is of: config.init_from=WORKDIR; of a text encoder "
            "as it is, it is read with config.dual.checkpoint"
        )


def check_tokens(modules: Sequence[Mapping[str, Any]]) -> None:
    """Refuse to train tokens with a model whose linear map nothing would train or write again.

    Raises:
        ConfigError: there is one.
    """
    if DENSE in kinds_of(modules):
        raise ConfigError(
            "modules.json: the folder's Dense module makes vectors, and a loss of tokens neither "
            "reads nor trains it; start from the checkpoint that was trained to make them, or "
            "leave modules.json out of a copy of the folder"
        )


def check_written(modules: Sequence[Mapping[str, Any]]) -> None:
    """Refuse to write a plain checkpoint of what has a linear map behind it.

    Raises:
        ConfigError: it does.
    """
    if DENSE in kinds_of(modules):
        raise ConfigError(
            "modules.json: a Hugging Face folder has no place for the Dense module behind this "
            "model; a run leaves with it by --format=sentence_transformers"
        )


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
    # Prompts are for those who ask for one by its name, and vectors are whole unless asked for.
    frozenset(("__version__", "prompts", "similarity_fn_name", "truncate_dim")),
)
