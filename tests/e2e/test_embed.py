"""Vectors of pictures and text, from a Hugging Face folder: against transformers alone."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from checkpoints import write_llava
from PIL import Image
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken

import jaxvlm
from jaxvlm.config import ConfigError, MeshConfig
from jaxvlm.data import chat, tokenizer
from jaxvlm.io import hf

torch = pytest.importorskip("torch", reason="the oracle; Python 3.11 only")
transformers = pytest.importorskip("transformers", reason="the oracle")

MESH = MeshConfig(data=2, fsdp=2, tensor=2)


@pytest.fixture(scope="module")
def folder(data, tmp_path_factory):
    return write_llava(tmp_path_factory.mktemp("llava") / "hf", data, "float32")


@pytest.fixture(scope="module")
def model(folder):
    return jaxvlm.load(folder, mesh=MESH)


def torch_vector(folder, pictures, said, told):
    """Last token's state of a conversation, of unit length."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    content = [{"type": "image"}] * len(pictures) + [{"type": "text", "text": said}]
    turns = [{"role": "system", "content": told}, {"role": "user", "content": content}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    text = text.replace("<image>", "<image>" * 4)
    inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    given = {"input_ids": inputs.input_ids}
    if pictures:
        processor = transformers.CLIPImageProcessorPil.from_pretrained(folder)
        opened = [Image.open(picture) for picture in pictures]
        given["pixel_values"] = processor(opened, return_tensors="pt").pixel_values
    theirs = transformers.LlavaForConditionalGeneration.from_pretrained(folder).eval()
    with torch.no_grad():
        state = theirs.model(**given).last_hidden_state[0, -1]
    return torch.nn.functional.normalize(state, dim=0).numpy()


def test_vectors_are_transformers(folder, model, tmp_path):
    rng = np.random.default_rng(2)
    pictures = [str(tmp_path / f"{i}.png") for i in range(2)]
    for path in pictures:
        Image.fromarray(rng.integers(0, 255, (23, 40, 3), np.uint8)).save(path)
    queries = [([pictures[0]], "which color"), ([], "it is red"), (pictures, "")]
    vectors = model.embed(queries, "which color is it")
    assert vectors.shape == (3, model.config.model.decoder.width)
    for (given, said), vector in zip(queries, vectors, strict=True):
        expected = torch_vector(folder, given, said or "NULL" * (not given), "which color is it.")
        assert vector @ expected > 1 - 1e-6
    assert abs(vectors[0] @ vectors[1]) < 0.9999
    cut = model.embed(queries, "which color is it", dims=8)
    wanted = vectors[:, :8] / np.linalg.norm(vectors[:, :8], axis=1, keepdims=True)
    np.testing.assert_allclose(cut, wanted, atol=1e-6)


@pytest.mark.parametrize(
    ("queries", "options", "said"),
    [
        ([([], "red")], {"dims": 33}, "dims=33: the model's vectors have 32"),
        ([([], "<image> red")], {}, "1 <image> marks but 0 pictures"),
        ([([], "red")], {"instruction": "an <image>"}, "instruction holds the special token"),
    ],
)
def test_what_cannot_be_is_refused(model, queries, options, said):
    with pytest.raises(ConfigError, match=said):
        model.embed(queries, **options)


def test_a_checkpoint_without_output_matrix_embeds_and_answers_nothing(folder, model, tmp_path):
    """Qwen3-VL-Embedding-8B is published so, and its config.json does not tell."""
    shutil.copytree(folder, tmp_path / "hf")
    tensors = {}
    for path in (tmp_path / "hf").glob("*.safetensors"):
        tensors |= load_file(path)
        path.unlink()
    (tmp_path / "hf" / hf.INDEX).unlink()
    heads = [name for name in tensors if name.endswith("lm_head.weight")]
    assert len(heads) == 1
    del tensors[heads[0]]
    save_file(tensors, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    bare = jaxvlm.load(tmp_path / "hf", mesh=MESH)
    assert not bare.config.model.decoder.head and "decoder/embed/out" not in bare.params
    queries = [([], "which color"), ([], "it is red")]
    np.testing.assert_array_equal(bare.embed(queries), model.embed(queries))
    with pytest.raises(ConfigError, match="no output matrix"):
        bare.generate([], "what?")


# As Qwen3-VL's: content is text or a list of parts, a picture lies between two marks.
CHATML = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}
{{- message.content }}
{%- else %}
{%- for part in message.content %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text }}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
MARKS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>")


def test_a_conversation_is_written_as_qwen3_vl_embeddings(tmp_path):
    """As the script published with the weights builds it, and the template writes it."""
    base = tokenizer.build(["a cat"], "bpe", 320)
    base.backend.add_special_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    special = tokenizer.SPECIAL | {"eos_token": MARKS[1], "image_token": MARKS[3]}
    ours = tokenizer.ChatTokenizer(base.backend, CHATML, special)
    ours.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    picture = "".join(MARKS[2:])
    for said, instruction, told, parts in [
        ("a cat", " Find it ", "Find it.", ["a cat"]),
        ("<image>a cat", "Is it?", "Is it?", [None, "a cat"]),
        ("<image>", "", "Represent the user's input.", [None]),
        ("", "", "Represent the user's input.", ["NULL"]),
    ]:
        text = ours.render(chat.to_embed(said, instruction), add_generation_prompt=True)
        shown = "".join(part or picture for part in parts)
        assert text == (
            f"<|im_start|>system\n{told}<|im_end|>\n<|im_start|>user\n{shown}<|im_end|>\n"
            "<|im_start|>assistant\n"
        )
        content = [{"type": "text", "text": p} if p else {"type": "image"} for p in parts]
        system = {"role": "system", "content": [{"type": "text", "text": told}]}
        assert text == theirs.apply_chat_template(
            [system, {"role": "user", "content": content}],
            tokenize=False,
            add_generation_prompt=True,
        )
