"""Small Hugging Face checkpoints of random weights, made with transformers."""

from __future__ import annotations

import json
import pathlib

from jaxvlm.data.conversations import tokenize
from jaxvlm.data.sources import conversation_formats
from jaxvlm.data.tokenizer import chat_tokenizer

SIZE, PATCH = 16, 8


def write_llava(
    folder: pathlib.Path, data: pathlib.Path, dtype: str = "bfloat16", shard: str = "20KB"
) -> pathlib.Path:
    """A LLaVA whose tokenizer knows the words of ``data``: several shards and an index."""
    import torch
    import transformers

    built = chat_tokenizer.build(
        tokenize.texts(conversation_formats.read(str(data))[0]), "word", 96
    )
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=2,
            image_size=SIZE,
            patch_size=PATCH,
            initializer_range=0.2,
        ),
        text_config=transformers.LlamaConfig(
            vocab_size=32,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.2,
        ),
        image_token_index=built.image_id,
        image_seq_length=(SIZE // PATCH) ** 2,
    )
    torch.manual_seed(1)
    model = transformers.LlavaForConditionalGeneration(config)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=shard)
    built.save(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(CLIP_PROCESSOR))
    (folder / "merges_of_somebody.txt").write_text("carried along\n")
    return folder


PINS = [[SIZE, 2 * SIZE], [2 * SIZE, SIZE], [2 * SIZE, 2 * SIZE]]


def write_llava_next(folder: pathlib.Path, data: pathlib.Path) -> pathlib.Path:
    """A LLaVA-NeXT in float32 whose tokenizer knows the words of ``data``."""
    import torch
    import transformers

    built = chat_tokenizer.build(
        tokenize.texts(conversation_formats.read(str(data))[0]), "word", 96
    )
    dims = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = transformers.LlavaNextConfig(
        vision_config=transformers.CLIPVisionConfig(
            **dims, num_attention_heads=2, image_size=SIZE, patch_size=PATCH, initializer_range=0.2
        ),
        text_config=transformers.MistralConfig(
            **dims, vocab_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8
        ),
        image_token_index=built.image_id,
        image_grid_pinpoints=PINS,
    )
    torch.manual_seed(1)
    transformers.LlavaNextForConditionalGeneration(config).save_pretrained(folder)
    built.save(folder)
    processor = CLIP_PROCESSOR | {
        "image_processor_type": "LlavaNextImageProcessor",
        "image_grid_pinpoints": PINS,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


CLIP_PROCESSOR = {
    "crop_size": {"height": SIZE, "width": SIZE},
    "do_center_crop": True,
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_processor_type": "CLIPImageProcessor",
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "resample": 3,
    "rescale_factor": 1 / 255,
    "size": {"shortest_edge": SIZE},
}


PATCHES_OF = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
QWEN_PROCESSOR = PATCHES_OF | {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_processor_type": "Qwen2VLImageProcessor",
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "resample": 3,
    "rescale_factor": 1 / 255,
    "size": {"shortest_edge": 64, "longest_edge": 1024},
}
_VISION = {"depth": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 48, "patch_size": 4}
_TOWERS = {
    "Qwen2_5_VL": {"window_size": 16, "fullatt_block_indexes": [1]},
    "Qwen3VL": {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
}


def write_qwen_vl(folder: pathlib.Path, data: pathlib.Path, kind: str = "Qwen2_5_VL"):
    """A Qwen-VL of one of the generations in ``_TOWERS``: images of 1 to 16 tokens."""
    import torch
    import transformers

    plain = chat_tokenizer.build(
        tokenize.texts(conversation_formats.read(str(data))[0]), "word", 96
    )
    around = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
    plain.backend.add_special_tokens(list(around))
    template = chat_tokenizer.TEMPLATE.replace("'<image>' if", f"'{''.join(around)}' if")
    built = chat_tokenizer.ChatTokenizer(
        plain.backend, template, chat_tokenizer.SPECIAL | {"image_token": around[1]}
    )
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    rope |= {"mrope_interleaved": True} if kind == "Qwen3VL" else {}
    head_dim = {"head_dim": 8} if kind == "Qwen3VL" else {}
    config = getattr(transformers, kind + "Config")(
        vision_config=_VISION | _TOWERS[kind] | {"out_hidden_size": 32},
        text_config=head_dim
        | {
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "rope_parameters": rope,
            "initializer_range": 0.2,
        },
        image_token_id=built.image_id,
        video_token_id=built.image_id + 20,
        vision_start_token_id=built.image_id - 1,
        vision_end_token_id=built.image_id + 1,
    )
    torch.manual_seed(1)
    model = getattr(transformers, kind + "ForConditionalGeneration")(config)
    model.save_pretrained(folder, max_shard_size="60KB")
    built.save(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(QWEN_PROCESSOR))
    return folder
