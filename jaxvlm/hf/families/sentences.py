"""Reads the modules and settings of a sentence-transformers folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxvlm.config import ConfigError, DualConfig
from jaxvlm.hf.families.config_reader import ConfigFields, read
from jaxvlm.hf.families.name_map import Entry, NameMap
from jaxvlm.types import TextStyle

DENSE = "Dense"
"""Name of the module of a linear map."""
POOLS = {"cls": "class", "mean": "mean", "lasttoken": "last"}
"""Pooling: sentence-transformers' name -> jaxvlm's."""
OLD_POOLS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_POOLING = ConfigFields(
    {"pooling_mode": None, "embedding_dimension": None, "word_embedding_dimension": None}
    | dict.fromkeys(OLD_POOLS, False),
    {"include_prompt": (True,)},
    frozenset(),
)

_DENSE = ConfigFields(
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
    """Return the kind of each module of ``modules.json``: ``Transformer``, ``Pooling``, …"""
    return [str(module.get("type", "")).rsplit(".", 1)[-1] for module in modules]


def place(modules: Sequence[Mapping[str, Any]], kind: str) -> str:
    """Return the path of the first module of a kind; "" if there is none."""
    paths = (module.get("path", "") for module in modules)
    matches = (path for path, k in zip(paths, kinds_of(modules), strict=True) if k == kind)
    return next(matches, "")


def with_modules(
    config: DualConfig,
    modules: Sequence[Mapping[str, Any]],
    pooling: Mapping[str, Any],
    dense: Mapping[str, Any],
) -> DualConfig:
    """Add the modules of a sentence-transformers folder after the encoder to its config.

    Args:
        config: settings of the encoder.
        modules: content of ``modules.json``.
        pooling: content of the pooling module's ``config.json``.
        dense: content of the linear map's ``config.json``; {} if there is none.

    Raises:
        ConfigError: an unsupported module or pooling mode.
    """
    kinds = kinds_of(modules)
    supported = ("", "Normalize", DENSE, f"{DENSE} Normalize")
    if kinds[:2] != ["Transformer", "Pooling"] or " ".join(kinds[2:]) not in supported:
        raise ConfigError(
            f"modules.json: {', '.join(kinds)} is not supported, only Transformer, Pooling, and "
            "optionally Dense and Normalize"
        )
    text = dataclasses.replace(config.text, pool=_pool(pooling, config.text.width))
    config = dataclasses.replace(config, text=text, normalize="Normalize" in kinds)
    return _with_map(config, dense) if DENSE in kinds else config


def _with_map(config: DualConfig, dense: Mapping[str, Any]) -> DualConfig:
    """Add the linear map of a Dense module to the config."""
    where, width = "the Dense module's config.json: ", config.text.width
    fields = read(dense, _DENSE, where)
    if fields["in_features"] != width or not fields["out_features"]:
        raise ConfigError(
            f"{where}in_features={fields['in_features']}, out_features={fields['out_features']}; "
            f"the module before it has {width} dims"
        )
    if str(fields["activation_function"]).rsplit(".", 1)[-1] != "Identity":
        raise ConfigError(
            f"{where}activation_function={fields['activation_function']} is not supported, only "
            "torch.nn.modules.linear.Identity"
        )
    out, bias = fields["out_features"], bool(fields["bias"])
    return dataclasses.replace(config, embed_dim=out, project=("text",), project_bias=bias)


def linear_map(config: DualConfig) -> NameMap:
    """Return the map of a Dense module's tensors to parameters.

    Args:
        config: result of :func:`with_modules`.
    """
    entries = [Entry("head/text", "linear.weight", "D E", "E D")]
    if config.project_bias:
        entries.append(Entry("head/text_bias", "linear.bias", "E", "E"))
    return NameMap(entries, {"D": config.text.width, "E": config.embed_dim}, {})


def _pool(pooling: Mapping[str, Any], width: int) -> str:
    """Return jaxvlm's name for a pooling module's mode; hidden states have ``width`` dims."""
    where = "the pooling module's config.json: "
    fields = read(pooling, _POOLING, where)
    for name in ("embedding_dimension", "word_embedding_dimension"):
        if fields[name] not in (None, width):
            raise ConfigError(f"{where}{name}={fields[name]}, but hidden_size={width}")
    mode = fields["pooling_mode"] or [OLD_POOLS[n] for n in OLD_POOLS if fields[n]] or "mean"
    modes = [mode] if isinstance(mode, str) else list(mode)
    if len(modes) != 1 or modes[0] not in POOLS:
        raise ConfigError(
            f"{where}pooling by {' and '.join(modes)} is not supported, only by one of "
            f"{', '.join(POOLS)}"
        )
    return POOLS[modes[0]]


def check_whole(modules: Sequence[Mapping[str, Any]]) -> None:
    """Check that a dual encoder, whose embeddings have unit norm, has no further modules.

    Raises:
        ConfigError: it has; the message lists the modules.
    """
    if (kinds := kinds_of(modules))[1:] not in ([], ["Normalize"]):
        raise ConfigError(
            f"modules.json: {', '.join(kinds)} is not supported for this model, only "
            "Transformer or CLIPModel and optionally Normalize"
        )


def check_last(
    modules: Sequence[Mapping[str, Any]], pooling: Mapping[str, Any], width: int
) -> None:
    """Check that a decoder's embedding is its last token's hidden state, scaled to unit norm.

    Args:
        modules: content of ``modules.json``.
        pooling: content of the pooling module's ``config.json``.
        width: width of the decoder.

    Raises:
        ConfigError: it is not; the message lists the modules.
    """
    kinds = kinds_of(modules)
    if kinds != ["Transformer", "Pooling", "Normalize"] or _pool(pooling, width) != "last":
        raise ConfigError(
            f"modules.json: {', '.join(kinds)} with this pooling is not supported for a "
            "vision-language model, only Transformer, Pooling by lasttoken and Normalize; load the "
            "workdir of the run that wrote it"
        )


def check_no_map(modules: Sequence[Mapping[str, Any]]) -> None:
    """Check that a folder to train embeddings from has no linear map, which would be lost.

    Raises:
        ConfigError: it has one.
    """
    if DENSE in kinds_of(modules):
        raise ConfigError(
            "modules.json: the folder's Dense module would not be read, but replaced by a new one; "
            "start from the run that wrote the folder, config.init_from=WORKDIR, or use a text "
            "encoder as it is with config.dual.checkpoint, which reads the Dense module"
        )


def check_tokens(modules: Sequence[Mapping[str, Any]]) -> None:
    """Check that a folder to train with a token loss has no linear map, which would be lost.

    Raises:
        ConfigError: it has one.
    """
    if DENSE in kinds_of(modules):
        raise ConfigError(
            "modules.json: the folder's Dense module computes embeddings, and a token loss neither "
            "reads nor trains it; start from the checkpoint that the embedding model was trained "
            "from, or from a copy of the folder without modules.json"
        )


def check_written(modules: Sequence[Mapping[str, Any]]) -> None:
    """Check that a model to export as a Hugging Face folder has no linear map after it.

    Raises:
        ConfigError: it has one.
    """
    if DENSE in kinds_of(modules):
        raise ConfigError(
            "modules.json: a Hugging Face folder has no place for the Dense module after this "
            "model; export the run with --format=sentence_transformers"
        )


def with_settings(
    style: TextStyle, first: Mapping[str, Any], whole: Mapping[str, Any]
) -> TextStyle:
    """Apply sentence-transformers' settings of texts to a family's text style.

    Args:
        style: text style of the encoder's family.
        first: content of ``sentence_bert_config.json``; may be empty.
        whole: content of ``config_sentence_transformers.json``; may be empty.

    Raises:
        ConfigError: an unknown field, or an unsupported value.
    """
    fields = read(first, _FIRST, "sentence_bert_config.json: ")
    read(whole, _WHOLE, "config_sentence_transformers.json: ")
    length = min(style.max_length, fields["max_seq_length"] or style.max_length)
    clean = str.lower if fields["do_lower_case"] else style.clean
    return style._replace(max_length=length, clean=clean)


_OUTPUT = {"method": "forward", "method_output_name": "last_hidden_state"}
_FIRST = ConfigFields(
    {"max_seq_length": None, "do_lower_case": False},
    {
        "transformer_task": ("feature-extraction",),
        "modality_config": ({"text": _OUTPUT},),
        "module_output_name": ("token_embeddings",),
    },
    frozenset(),
)
_WHOLE = ConfigFields(
    {},
    {"default_prompt_name": (None,), "model_type": ("SentenceTransformer",)},
    # A prompt is used only if it is named, and embeddings are truncated only on request.
    frozenset(("__version__", "prompts", "similarity_fn_name", "truncate_dim")),
)
