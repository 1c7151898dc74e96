"""Writes the JSON files of a sentence-transformers folder, in addition to the model's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxvlm.config import ConfigError, DualConfig
from jaxvlm.hf.families.sentences import DENSE, OLD_POOLS, POOLS, kinds_of, place

_TEXT = ("bert",)
_BOTH = ("clip", "siglip", "siglip2")
_CHATS = ("llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
KINDS = (*_TEXT, *_BOTH, *_CHATS)
"""``model_type`` of models whose embeddings sentence-transformers computes as jaxvlm does."""


class EmbeddingModules(NamedTuple):
    """How hidden states become embeddings, and the prompts of queries and documents."""

    pool: str
    """last | mean | first | class; "" if the model's own heads compute embeddings."""
    width: int
    """Dims of the pooled hidden states."""
    dense: tuple[int, bool] | None
    """Output dims of a linear map, and whether it has a bias; ``None``: no linear map."""
    normalize: bool
    """Whether embeddings are scaled to unit norm."""
    prompts: Mapping[str, str]
    """Name -> prefix of a text, or system message."""
    default: str | None
    """Name of the default prompt."""
    similarity: str
    """cosine | dot."""
    truncate_dim: int
    """Dims that embeddings are truncated to; 0: all."""


def files(
    kind: str, embeddings: EmbeddingModules, first: Mapping[str, Any]
) -> dict[str, dict | list]:
    """Build the JSON files of a folder.

    Args:
        kind: ``model_type`` of the model, one of :data:`KINDS`.
        embeddings: how it computes embeddings.
        first: content of ``sentence_bert_config.json``, from :func:`inputs`.

    Returns:
        Path in the folder -> content.

    Raises:
        ConfigError: a pooling mode that sentence-transformers does not have.
    """
    names = ["CLIPModel" if kind == "clip" else "Transformer"]
    result: dict[str, dict | list] = {}

    def module(name: str, **config: Any) -> None:
        result[f"{len(names)}_{name}/config.json"] = config
        names.append(name)

    if embeddings.pool:
        modes = {ours: theirs for theirs, ours in POOLS.items()} | {"first": "cls"}
        if embeddings.pool not in modes:
            raise ConfigError(
                f"sentence-transformers has no pooling by {embeddings.pool!r}, only by "
                f"{', '.join(modes)}"
            )
        # The flags are read by all versions of sentence-transformers.
        flags = {name: modes[embeddings.pool] == mode for name, mode in OLD_POOLS.items()}
        module("Pooling", word_embedding_dimension=embeddings.width, **flags)
    if embeddings.dense:
        out, bias = embeddings.dense
        options = {"bias": bias, "activation_function": "torch.nn.modules.linear.Identity"}
        module(DENSE, in_features=embeddings.width, out_features=out, **options)
    if embeddings.normalize:
        module("Normalize")
    listed = [
        {"idx": i, "name": str(i), "path": f"{i}_{name}" if i else "", "type": _TYPE + name}
        for i, name in enumerate(names)
    ]
    whole: dict[str, Any] = {
        "model_type": "SentenceTransformer",
        "prompts": dict(embeddings.prompts),
        "default_prompt_name": embeddings.default,
        # Truncated after Normalize, embeddings are not of unit length, as they were trained.
        "similarity_fn_name": "cosine" if embeddings.truncate_dim else embeddings.similarity,
    }
    if embeddings.truncate_dim:
        whole["truncate_dim"] = embeddings.truncate_dim
    result["modules.json"] = listed
    result["sentence_bert_config.json"] = dict(first)
    result["config_sentence_transformers.json"] = whole
    return result


_TYPE = "sentence_transformers.models."
SEEN: Mapping[str, Any] = {
    "transformer_task": "feature-extraction",
    "modality_config": {"image": {"method": "forward", "method_output_name": "pooler_output"}},
    "module_output_name": "sentence_embedding",
}
"""Inputs of a vision tower on its own, as fields of ``sentence_bert_config.json``."""
_ROUTES = {"text": "text", "vision": "image"}


def names(found: Mapping[str, Any]) -> list[str]:
    """Return the modules of :func:`files`: ``0_Transformer``, ``1_Pooling``, …"""
    return [f"{i}_{kind}" for i, kind in enumerate(kinds_of(found["modules.json"]))]


def linear_map(found: Mapping[str, Any]) -> str:
    """Return the folder of the linear map in :func:`files`; "" if there is none."""
    return place(found["modules.json"], DENSE)


def routed(towers: Mapping[str, Mapping[str, Any]]) -> dict[str, dict | list]:
    """Build the JSON files of a Router module, which sends texts and images to their own towers.

    Args:
        towers: :func:`files` of ``text`` and ``vision``; prompts are those of ``text``.

    Returns:
        Path in the folder -> content.
    """
    out: dict[str, dict | list] = {}
    structure: dict[str, list[str]] = {}
    types: dict[str, str] = {}
    for tower, found in towers.items():
        first, *others = (f"{tower}_{name}" for name in names(found))
        structure[_ROUTES[tower]] = [first, *others]
        types |= zip((first, *others), (m["type"] for m in found["modules.json"]), strict=True)
        out[f"{first}/sentence_bert_config.json"] = found["sentence_bert_config.json"]
        for name in others:
            alone = name.removeprefix(f"{tower}_")
            out[f"{name}/config.json"] = found.get(f"{alone}/config.json", {})
    mappings = {f"(None, {route!r})": route for route in structure}
    out["router_config.json"] = {
        "types": types,
        "structure": structure,
        "parameters": {
            "default_route": "text",
            "allow_empty_key": True,
            "route_mappings": mappings,
        },
    }
    out["modules.json"] = [{"idx": 0, "name": "0", "path": "", "type": _TYPE + "Router"}]
    whole = "config_sentence_transformers.json"
    out[whole] = towers["text"][whole]
    return out


def inputs(
    kind: str, config: DualConfig | None, length: int = 0, patches: int = 0, lower: bool = False
) -> dict[str, Any]:
    """Describe a model's inputs, as fields of ``sentence_bert_config.json``.

    Args:
        kind: its ``model_type``.
        config: settings of an encoder; ``None``: a model with a chat template.
        length: maximum tokens of a text; not read for a model with a chat template.
        patches: maximum patches of an image of any size; 0: images have one size.
        lower: whether texts are lowercased before tokenization; read for BERT only.

    Raises:
        ConfigError: a kind that is not in :data:`KINDS`.
    """
    if kind not in KINDS:
        raise ConfigError(
            f"a model of model_type={kind!r} can't be exported for sentence-transformers, only "
            f"{', '.join(KINDS)}"
        )
    if kind in _TEXT:
        return {"max_seq_length": length, "do_lower_case": lower}
    if config is None:
        forward = {"method": "forward", "method_output_name": "last_hidden_state"}
        modalities: dict[str, Any] = dict.fromkeys(("text", "image", "image+text"), forward)
        return {
            "transformer_task": "feature-extraction",
            "modality_config": modalities | {"message": forward | {"format": "structured"}},
            "module_output_name": "token_embeddings",
            "processing_kwargs": {"chat_template": {"add_generation_prompt": True}},
        }
    text: dict[str, Any] = {"max_length": length, "truncation": True}
    if not config.text.causal:  # SigLIP attends to padding
        text |= {"padding": "max_length", "return_attention_mask": False}
    kwargs = {"text": text}
    if patches:
        kwargs["image"] = {"max_num_patches": patches, "patch_size": config.vision.patch_size}
    return {
        "transformer_task": "feature-extraction",
        "modality_config": {
            m: {"method": f"get_{m}_features", "method_output_name": "pooler_output"}
            for m in ("text", "image")
        },
        "module_output_name": "sentence_embedding",
        "processing_kwargs": kwargs,
    }
