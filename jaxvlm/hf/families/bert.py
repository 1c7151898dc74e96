"""BERT (arXiv 1810.04805): Hugging Face config and tensor names.

The file's dropout rates are ignored; in training a recipe sets config.dual.text.dropout and
config.dual.text.attention_dropout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxvlm.config import DualConfig, TextConfig
from jaxvlm.hf.families import text_encoders
from jaxvlm.hf.families.config_reader import METADATA, ConfigFields, activation, read
from jaxvlm.hf.families.name_map import Entry, NameMap
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
            vocab_size=text["vocab_size"],
            width=text["hidden_size"],
            depth=text["num_hidden_layers"],
            num_heads=text["num_attention_heads"],
            mlp_dim=text["intermediate_size"],
            max_length=text["max_position_embeddings"],
            num_types=text["type_vocab_size"],
            activation=activation(text["hidden_act"], where + "hidden_act"),
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
    entries = (*(Entry(*row) for row in _TOP), *_blocks())
    return NameMap(entries, sizes, {"text": config.text.depth}, _ALIASES, ("position_ids",))


_TOP = (
    ("text/table", "embeddings.word_embeddings.weight", "V D", "V D"),
    ("text/position", "embeddings.position_embeddings.weight", "T D", "T D"),
    ("text/types", "embeddings.token_type_embeddings.weight", "Y D", "Y D"),
    ("text/norm/scale", "embeddings.LayerNorm.weight", "D", "D"),
    ("text/norm/bias", "embeddings.LayerNorm.bias", "D", "D"),
    ("text/w_pool", "pooler.dense.weight", "D E", "E D"),
    ("text/b_pool", "pooler.dense.bias", "E", "E"),
)
_LINEAR = (
    ("attn/{}q", "attention.self.query", ("D N H", "NH D"), ("N H", "NH")),
    ("attn/{}k", "attention.self.key", ("D N H", "NH D"), ("N H", "NH")),
    ("attn/{}v", "attention.self.value", ("D N H", "NH D"), ("N H", "NH")),
    ("attn/{}o", "attention.output.dense", ("N H D", "D NH"), ("D", "D")),
    ("mlp/{}_in", "intermediate.dense", ("D F", "F D"), ("F", "F")),
    ("mlp/{}_out", "output.dense", ("F D", "D F"), ("D", "D")),
)
_NORMS = (("norm1", "attention.output.LayerNorm"), ("norm2", "output.LayerNorm"))
_ALIASES = (
    (r"^bert\.", ""),
    # TensorFlow's names, in the oldest checkpoints.
    (r"LayerNorm\.gamma$", "LayerNorm.weight"),
    (r"LayerNorm\.beta$", "LayerNorm.bias"),
)


def _blocks() -> list[Entry]:
    ours, layer, entries = "text/stack/blocks/", "encoder.layer.{}.", []
    for name, theirs, weight, bias in _LINEAR:
        entries.append(Entry(ours + name.format("w"), f"{layer}{theirs}.weight", *weight))
        entries.append(Entry(ours + name.format("b"), f"{layer}{theirs}.bias", *bias))
    for name, theirs in _NORMS:
        entries.append(Entry(f"{ours}{name}/scale", f"{layer}{theirs}.weight", "D", "D"))
        entries.append(Entry(f"{ours}{name}/bias", f"{layer}{theirs}.bias", "D", "D"))
    return entries


def text_style(config: DualConfig, tokenizer_config: Mapping[str, Any]) -> TextStyle:
    """Return BERT's text style: special tokens around a text, and padding is masked."""
    return TextStyle(config.text.max_length)
