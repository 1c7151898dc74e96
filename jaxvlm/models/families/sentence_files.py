"""The files of a sentence-transformers folder besides a model's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxvlm.config import ConfigError, DualConfig
from jaxvlm.models.families.sentences import DENSE, OLD_POOLS, POOLS, kinds_of, place

_TEXT = ("bert",)
_BOTH = ("clip", "siglip", "siglip2")
_CHATS = ("llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
KINDS = (*_TEXT, *_BOTH, *_CHATS)
"""``model_type`` of models whose vectors sentence-transformers makes as jaxvlm does."""


class Vectors(NamedTuple):
    """How a model's states become vectors, and how it is asked for them."""

    pool: str
    """last | mean | first | class; "" where the model's own heads do it."""
    width: int
    """Dims of what is pooled."""
    dense: tuple[int, bool] | None
    """Dims behind a linear map, and whether it has a bias."""
    normalize: bool
    prompts: Mapping[str, str]
    """Name -> what stands before a text, or is the system's turn."""
    default: str | None
    """The prompt of items without one."""
    similarity: str
    """cosine | dot."""
    truncate_dim: int
    """Dims of a vector; 0: all."""


def files(kind: str, vectors: Vectors, first: Mapping[str, Any]) -> dict[str, dict | list]:
    """Path in the folder -> content, of all that is JSON.

    Args:
        kind: ``model_type`` of the model, one of :data:`KINDS`.
        vectors: how it makes them.
        first: what is said of the model's inputs, see :func:`inputs`.

    Raises:
        ConfigError: a way of pooling that sentence-transformers does not have.
    """
    names = ["CLIPModel" if kind == "clip" else "Transformer"]
    found: dict[str, dict | list] = {}

    def module(name: str, **config: Any) -> None:
        found[f"{len(names)}_{name}/config.json"] = config
        names.append(name)

    if vectors.pool:
        modes = {ours: theirs for theirs, ours in POOLS.items()} | {"first": "cls"}
        if vectors.pool not in modes:
            raise ConfigError(
                f"sentence-transformers has no pooling by {vectors.pool!r}, only by "
                f"{', '.join(modes)}"
            )
        # In the words that every version reads.
        flags = {name: modes[vectors.pool] == mode for name, mode in OLD_POOLS.items()}
        module("Pooling", word_embedding_dimension=vectors.width, **flags)
    if vectors.dense:
        out, bias = vectors.dense
        how = {"bias": bias, "activation_function": "torch.nn.modules.linear.Identity"}
        module(DENSE, in_features=vectors.width, out_features=out, **how)
    if vectors.normalize:
        module("Normalize")
    listed = [
        {"idx": i, "name": str(i), "path": f"{i}_{name}" if i else "", "type": _TYPE + name}
        for i, name in enumerate(names)
    ]
    whole: dict[str, Any] = {
        "model_type": "SentenceTransformer",
        "prompts": dict(vectors.prompts),
        "default_prompt_name": vectors.default,
        "similarity_fn_name": vectors.similarity,
    }
    if vectors.truncate_dim:
        whole["truncate_dim"] = vectors.truncate_dim
    found["modules.json"] = listed
    found["sentence_bert_config.json"] = dict(first)
    found["config_sentence_transformers.json"] = whole
    return found


_TYPE = "sentence_transformers.models."
SEEN: Mapping[str, Any] = {
    "transformer_task": "feature-extraction",
    "modality_config": {"image": {"method": "forward", "method_output_name": "pooler_output"}},
    "module_output_name": "sentence_embedding",
}
"""What a vision tower alone takes, in the words of ``sentence_bert_config.json``."""
_ROUTES = {"text": "text", "vision": "image"}


def names(found: Mapping[str, Any]) -> list[str]:
    """``0_Transformer``, ``1_Pooling``, …: the modules of :func:`files`."""
    return [f"{i}_{kind}" for i, kind in enumerate(kinds_of(found["modules.json"]))]


def linear_map(found: Mapping[str, Any]) -> str:
    """The folder of the linear map among the modules of :func:`files`; "" where there is none."""
    return place(found["modules.json"], DENSE)


def routed(towers: Mapping[str, Mapping[str, Any]]) -> dict[str, dict | list]:
    """Path in the folder -> content, of towers that are chosen by what an item is.

    Args:
        towers: :func:`files` of ``text`` and ``vision``; prompts are those of ``text``.
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
            out[f"{name}/config.json"] = found.get(
                f"{name.removeprefix(f'{tower}_')}/config.json", {}
            )
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
    """What a model takes, in the words of ``sentence_bert_config.json``.

    Args:
        kind: its ``model_type``.
        config: of an encoder; ``None``: a model with a chat template.
        length: tokens of a text at most; not of a model with a chat template.
        patches: of a picture of any size at most; 0: pictures have one size.
        lower: whether texts are made lower case before the tokenizer has them; read of BERT.

    Raises:
        ConfigError: a kind that is not in :data:`KINDS`.
    """
    if kind not in KINDS:
        raise ConfigError(
            f"a model of model_type={kind!r} is not written for sentence-transformers, only "
            f"{', '.join(KINDS)}"
        )
    if kind in _TEXT:
        return {"max_seq_length": length, "do_lower_case": lower}
    if config is None:
        how = {"method": "forward", "method_output_name": "last_hidden_state"}
        ways: dict[str, Any] = dict.fromkeys(("text", "image", "image+text"), how)
        return {
            "transformer_task": "feature-extraction",
            "modality_config": ways | {"message": how | {"format": "structured"}},
            "module_output_name": "token_embeddings",
            "processing_kwargs": {"chat_template": {"add_generation_prompt": True}},
        }
    text: dict[str, Any] = {"max_length": length, "truncation": True}
    if not config.text.causal:  # SigLIP sees padding
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
