"""Reads Hugging Face's ``config.json``; a field is read, known to be irrelevant, or refused."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jaxvlm.config import ConfigError, check_choice
from jaxvlm.config.convert import check_ranges, checked_fields

_GENERATION = frozenset(
    (
        *("bad_words_ids", "begin_suppress_tokens", "cross_attention_hidden_size"),
        *("decoder_start_token_id", "diversity_penalty", "do_sample", "early_stopping"),
        *("encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "finetuning_task"),
        *("forced_bos_token_id", "forced_eos_token_id", "length_penalty", "max_length"),
        *("min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams"),
        *("num_return_sequences", "output_scores", "prefix", "remove_invalid_values"),
        *("repetition_penalty", "return_dict_in_generate", "sep_token_id", "suppress_tokens"),
        *("task_specific_params", "temperature", "tf_legacy_loss", "tie_encoder_decoder"),
        *("tokenizer_class", "top_k", "top_p", "typical_p"),
    )
)
"""Fields that transformers 4 wrote into every group of some models, and that nothing reads."""

METADATA = _GENERATION | frozenset(
    (
        *("_attn_implementation", "_attn_implementation_autoset", "_name_or_path", "architectures"),
        *("bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id", "id2label"),
        *("ignore_index", "image_seq_length", "image_token_id", "image_token_index"),
        *("initializer_factor", "initializer_range", "is_encoder_decoder", "label2id"),
        *("max_position_embeddings", "output_attentions", "output_hidden_states", "pad_token_id"),
        *("padding_side", "pretraining_tp", "problem_type", "projection_dim", "return_dict"),
        *("torch_dtype", "torchscript", "transformers_version", "use_bfloat16", "use_cache"),
    )
)
"""Fields that do not change a network's output."""

ACTIVATIONS = {
    "gelu": "gelu",
    "quick_gelu": "quick_gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
}
"""Activation: Hugging Face's name -> jaxvlm's."""


class ConfigFields(NamedTuple):
    """Fields that a group of ``config.json`` may have."""

    reads: dict[str, Any]
    """Field that is read -> Hugging Face's default."""
    only: dict[str, tuple[Any, ...]]
    """Field -> values that a family supports; others are refused."""
    ignored: frozenset[str] = METADATA
    """Fields that do not change the output."""


def read(group: Mapping[str, Any], fields: ConfigFields, where: str) -> dict[str, Any]:
    """Read the fields ``fields.reads`` of a group.

    Args:
        group: a group of ``config.json``.
        fields: the fields that a family knows.
        where: prefix of field names in error messages.

    Raises:
        ConfigError: an unknown field, or a value that the family does not support.
    """
    for name, value in group.items():
        if name in fields.only and value not in fields.only[name]:
            supported = " or ".join(map(repr, fields.only[name]))
            raise ConfigError(f"{where}{name}={value!r} is not supported here, only {supported}")
        if name not in fields.reads and name not in fields.only and name not in fields.ignored:
            raise ConfigError(f"{where}{name}={value!r} is unknown to this family")
    return {name: group.get(name, default) for name, default in fields.reads.items()}


@contextlib.contextmanager
def refusing(where: str) -> Iterator[None]:
    """Turn what a value of a wrong type raises in code that reads it into one error.

    Args:
        where: the file, for the message.

    Raises:
        ConfigError: the code raised an error of Python; one of jaxvlm passes through.
    """
    try:
        yield
    except ConfigError:
        raise
    except _OF_VALUES as error:
        from jaxvlm.data.errors import DataError  # imports all that reads data

        if isinstance(error, DataError):
            raise
        what = f"{type(error).__name__}: {str(error)[:200]}"
        raise ConfigError(f"{where}: a value that can't be read ({what}); fetch it again") from None


_OF_VALUES = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


def model_of(family: Any, hf_config: Mapping[str, Any]) -> Any:
    """Read a model's settings by its family's ``config_from_hf``, and check each one.

    Args:
        family: a ``Family`` or an ``EncoderFamily``.
        hf_config: content of ``config.json``.

    Raises:
        ConfigError: the family refuses a field; or a value has a wrong type, or is out of range.
    """
    with refusing("config.json"):
        model = family.config_from_hf(hf_config)
        for name in _GROUPS:
            group = getattr(model, name, None)
            if dataclasses.is_dataclass(group):
                checked_fields(group, type(group), f"config.json, as model.{name}")
        check_ranges(model, "config.json, as model")
        return model


_GROUPS = ("vision", "connector", "decoder", "text")


class FeatureLayers(NamedTuple):
    """Layers of a vision encoder that a VLM reads: ``vision_feature_layer`` and its strategy."""

    layer: Any = None
    """Index into Hugging Face's ``hidden_states`` (0 is the embeddings), or several; ``None``: the
    vision encoder's output, after its final norm if it has one."""
    whole: bool = False
    """All tokens (``full``), or all but the first one (``default``)."""

    def layers(self, depth: int) -> tuple[int, ...]:
        """Return the layers as ``VisionConfig`` counts them, from the end; () is the output.

        Raises:
            ConfigError: there is no such layer.
        """
        if self.layer is None:
            return ()
        several = self.layer if isinstance(self.layer, list | tuple) else [self.layer]
        layers = [n if n < 0 else n - depth - 1 for n in several if isinstance(n, int)]
        if len(layers) != len(several) or not all(-depth - 1 <= n <= -1 for n in layers):
            raise ConfigError(
                f"config.json: vision_feature_layer={self.layer!r}; the vision encoder has the "
                f"layers -{depth + 1}..-1"
            )
        return tuple(layers)


def square(size: Any, field: str) -> int:
    """Return the side of a square that is given as one number or two.

    Raises:
        ConfigError: it is not a square; ``field`` names it.
    """
    sides = set(size) if isinstance(size, list | tuple) else {size}
    if len(sides) != 1:
        raise ConfigError(f"{field}={size!r}: only squares are supported")
    return int(sides.pop())


def rope_base(parameters: Mapping[str, Any] | None, field: str) -> float:
    """Return the RoPE base of positions over rows and columns.

    Raises:
        ConfigError: another kind of positions; ``field`` names it.
    """
    rest = dict(parameters or {})
    kind, theta = rest.pop("rope_type", "axial"), rest.pop("rope_theta", 10_000.0)
    if kind != "axial" or rest:
        raise ConfigError(f"{field}={parameters!r}: only rope_type='axial' with rope_theta")
    return float(theta)


def activation(name: str, field: str) -> str:
    """Return jaxvlm's name of an activation.

    Raises:
        ConfigError: it is not supported; ``field`` names it.
    """
    check_choice(field, name, ACTIVATIONS)
    return ACTIVATIONS[name]


def block_sizes(group: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the settings of an encoder's blocks that ``VisionConfig`` and ``TextConfig`` share.

    Args:
        group: values of the fields of a group of ``config.json``.
        where: prefix of field names in error messages.
    """
    return {
        "width": group["hidden_size"],
        "depth": group["num_hidden_layers"],
        "num_heads": group["num_attention_heads"],
        "mlp_dim": group["intermediate_size"],
        "activation": activation(group["hidden_act"], where + "hidden_act"),
    }


def image_token_id(hf_config: Mapping[str, Any]) -> int:
    """Return the id of the image token, which is at the positions of visual tokens.

    Raises:
        ConfigError: the file does not have it.
    """
    for name in ("image_token_id", "image_token_index"):
        if hf_config.get(name) is not None:
            return int(hf_config[name])
    raise ConfigError("config.json: image_token_id is missing")
