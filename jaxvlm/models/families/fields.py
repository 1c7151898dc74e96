"""Reading Hugging Face's ``config.json`` so that nothing in it is overlooked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxvlm.config import ConfigError

_GENERATION = frozenset(
    (
        "bad_words_ids",
        "begin_suppress_tokens",
        "cross_attention_hidden_size",
        "decoder_start_token_id",
        "diversity_penalty",
        "do_sample",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "exponential_decay_length_penalty",
        "finetuning_task",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "length_penalty",
        "max_length",
        "min_length",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_scores",
        "prefix",
        "remove_invalid_values",
        "repetition_penalty",
        "return_dict_in_generate",
        "sep_token_id",
        "suppress_tokens",
        "task_specific_params",
        "temperature",
        "tf_legacy_loss",
        "tie_encoder_decoder",
        "tokenizer_class",
        "top_k",
        "top_p",
        "typical_p",
    )
)
"""What transformers 4 wrote into every group of some models, though nothing reads it there."""

METADATA = _GENERATION | frozenset(
    (
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_name_or_path",
        "architectures",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "ignore_index",
        "image_seq_length",
        "image_token_id",
        "image_token_index",
        "initializer_factor",
        "initializer_range",
        "is_encoder_decoder",
        "label2id",
        "max_position_embeddings",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "padding_side",
        "pretraining_tp",
        "problem_type",
        "projection_dim",
        "return_dict",
        "torch_dtype",
        "torchscript",
        "transformers_version",
        "use_bfloat16",
        "use_cache",
    )
)
"""Fields that change no output of a network."""

ACTIVATIONS = {
    "gelu": "gelu",
    "quick_gelu": "quick_gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
}
"""Hugging Face's name -> ours."""


class Fields(NamedTuple):
    """What a group of ``config.json`` may say."""

    reads: dict[str, Any]
    """Field -> Hugging Face's default where the file leaves it out."""
    only: dict[str, tuple[Any, ...]]
    """Field -> the values that a family can do."""
    ignored: frozenset[str] = METADATA
    """Fields that change no output."""


def read(group: Mapping[str, Any], fields: Fields, where: str) -> dict[str, Any]:
    """The values of ``fields.reads``.

    Args:
        group: of ``config.json``.
        fields: what a family understands.
        where: what error messages put before a field's name.

    Raises:
        ConfigError: a field that is unknown, or a value that the family can't do.
    """
    for name, value in group.items():
        if name in fields.only and value not in fields.only[name]:
            can = " or ".join(map(repr, fields.only[name]))
            raise ConfigError(f"{where}{name}={value!r} is not supported here, only {can}")
        if name not in fields.reads and name not in fields.only and name not in fields.ignored:
            raise ConfigError(f"{where}{name}={value!r} is unknown to this family")
    return {name: group.get(name, default) for name, default in fields.reads.items()}


class Features(NamedTuple):
    """What a VLM takes of its vision tower: ``vision_feature_layer`` and its strategy."""

    layer: Any = None
    """An index of Hugging Face's ``hidden_states`` (0 is the embeddings), or several of them;
    ``None`` is the tower's last output, behind its norm if it has one."""
    whole: bool = False
    """With all tokens (``full``), not without the first one (``default``)."""

    def layers(self, depth: int) -> tuple[int, ...]:
        """From the end, as ``VisionConfig`` counts them; () is the tower's last output.

        Raises:
            ConfigError: no such layer.
        """
        if self.layer is None:
            return ()
        several = self.layer if isinstance(self.layer, list | tuple) else [self.layer]
        found = [n if n < 0 else n - depth - 1 for n in several if isinstance(n, int)]
        if len(found) != len(several) or not all(-depth - 1 <= n <= -1 for n in found):
            raise ConfigError(
                f"config.json: vision_feature_layer={self.layer!r}; the tower has the layers "
                f"-{depth + 1}..-1"
            )
        return tuple(found)


def square(size: Any, field: str) -> int:
    """The side of a square that is written as one number or as two.

    Raises:
        ConfigError: it is none; ``field`` says where it stands.
    """
    sides = set(size) if isinstance(size, list | tuple) else {size}
    if len(sides) != 1:
        raise ConfigError(f"{field}={size!r}: only squares are supported")
    return int(sides.pop())


def rope_base(parameters: Mapping[str, Any] | None, field: str) -> float:
    """The base of rotary positions over rows and columns.

    Raises:
        ConfigError: another kind of positions; ``field`` says where it stands.
    """
    said = dict(parameters or {})
    kind, theta = said.pop("rope_type", "axial"), said.pop("rope_theta", 10_000.0)
    if kind != "axial" or said:
        raise ConfigError(f"{field}={parameters!r}: only rope_type='axial' with rope_theta")
    return float(theta)


def activation(name: str, field: str) -> str:
    """Our name of an activation.

    Raises:
        ConfigError: none of ours is that; ``field`` says where it stands.
    """
    if name not in ACTIVATIONS:
        raise ConfigError(f"{field}={name!r}; known: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def image_token_id(hf_config: Mapping[str, Any]) -> int:
    """The id of the token that stands where a picture's feature goes.

    Raises:
        ConfigError: the file does not say.
    """
    for name in ("image_token_id", "image_token_index"):
        if hf_config.get(name) is not None:
            return int(hf_config[name])
    raise ConfigError("config.json: image_token_id is missing")
