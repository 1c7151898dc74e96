"""BERT (arXiv 1810.04805): Hugging Face config and tensor names.

The file's dropout rates are ignored; in training a recipe sets config.dual.text.dropout and
config.dual.text.attention_dropout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxvlm.config import DualConfig, TextConfig
from jaxvlm.hf.families import text_encoders
from jaxvlm.hf.families.config_reader import METADATA, ConfigFields, block_sizes, read
from jaxvlm.hf.families.name_map import Entry, NameMap, linear_layer, norm_layer
from jaxvlm.types import TextStyle

_FIELDS = ConfigFields(
    {
        "vocab_size": 30522,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "hidden_act": "gelu",
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
    },
    {
        "model_type": ("bert",),
        "is_decoder": (False,),
        "add_cross_attention": (False,),
        "position_embedding_type": ("absolute",),
    },
    (METADATA - {"max_position_embeddings"})
    | {"hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"}
    | {"gradient_checkpointing", "tie_word_embeddings"},
)


def config_from_hf(hf_config: Mapping[str, Any]) -> DualConfig:
    """Read a BERT encoder's settings from ``config.json``; embeddings are means over tokens.

    Args:
        hf_config: the file's content.

    Raises:
        ConfigError: an unknown field, or a value that this family does not support.
    """
    where = "config.json: "
    text = read(hf_config, _FIELDS, where)
    return DualConfig(
        towers=("text",),
        vision=DualConfig().vision,
        text=TextConfig(
            **block_sizes(text, where),
            vocab_size=text["vocab_size"],
            max_length=text["max_position_embeddings"],
            num_types=text["type_vocab_size"],
            norm_after=True,
            norm_eps=float(text["layer_norm_eps"]),
            pooler=True,
        ),
        embed_dim=text["hidden_size"],
        project=(),
        normalize=False,
    )


def weights(config: DualConfig) -> NameMap:
    """Map all parameters to tensors, under the names of transformers' ``BertModel``.

    Args:
        config: result of :func:`config_from_hf`.
    """
    sizes = {**text_encoders.dims(config.text), "E": config.text.width}
    top = (Entry(*row) for row in _TOP)
    entries = (*top, *norm_layer("text/norm", "embeddings.LayerNorm", "D"), *_blocks())
    return NameMap(entries, sizes, {"text": config.text.depth}, _ALIASES, ("position_ids",))


_TOP = (
    ("text/table", "embeddings.word_embeddings.weight", "V D", "V D"),
    ("text/position", "embeddings.position_embeddings.weight", "T D", "T D"),
    ("text/types", "embeddings.token_type_embeddings.weight", "Y D", "Y D"),
    ("text/w_pool", "pooler.dense.weight", "D E", "E D"),
    ("text/b_pool", "pooler.dense.bias", "E", "E"),
)
_LINEAR = (
    ("attn/{}q", "attention.self.query", "D N H", "NH D"),
    ("attn/{}k", "attention.self.key", "D N H", "NH D"),
    ("attn/{}v", "attention.self.value", "D N H", "NH D"),
    ("attn/{}o", "attention.output.dense", "N H D", "D NH"),
    ("mlp/{}_in", "intermediate.dense", "D F", "F D"),
    ("mlp/{}_out", "output.dense", "F D", "D F"),
)
_NORMS = (("norm1", "attention.output.LayerNorm"), ("norm2", "output.LayerNorm"))
_ALIASES = (
    (r"^bert\.", ""),
    # TensorFlow's names, in the oldest checkpoints.
    (r"LayerNorm\.gamma$", "LayerNorm.weight"),
    (r"LayerNorm\.beta$", "LayerNorm.bias"),
)


def _blocks() -> list[Entry]:
    ours, layer = "text/stack/blocks/", "encoder.layer.{}."
    entries: list[Entry] = []
    for name, theirs, dims, their_dims in _LINEAR:
        entries += linear_layer(ours + name, layer + theirs, dims, their_dims)
    for name, theirs in _NORMS:
        entries += norm_layer(ours + name, layer + theirs, "D")
    return entries


def text_style(config: DualConfig, tokenizer_config: Mapping[str, Any]) -> TextStyle:
    """Return BERT's text style: special tokens around a text, and padding is masked."""
    return TextStyle(config.text.max_length)
