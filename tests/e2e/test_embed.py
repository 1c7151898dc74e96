"""Embeddings of images and text from a Hugging Face folder, compared with transformers."""

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
from jaxvlm.data.conversations import tokenize
from jaxvlm.data.tokenizer import chat_tokenizer
from jaxvlm.hf import safetensors

torch = pytest.importorskip("torch", reason="the oracle; Python 3.11 only")
transformers = pytest.importorskip("transformers", reason="the oracle")

MESH = MeshConfig(data=2, fsdp=2, tensor=2)


@pytest.fixture(scope="module")
def folder(data, tmp_path_factory):
    return write_llava(tmp_path_factory.mktemp("llava") / "hf", data, "float32")


@pytest.fixture(scope="module")
def model(folder):
    return jaxvlm.load(folder, mesh=MESH)


def torch_embedding(folder, images, said, told):
    """The hidden state of a conversation's last token, at unit length."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    content = [{"type": "image"}] * len(images) + [{"type": "text", "text": said}]
    turns = [{"role": "system", "content": told}, {"role": "user", "content": content}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    text = text.replace("<image>", "<image>" * 4)
    inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    given = {"input_ids": inputs.input_ids}
    if images:
        processor = transformers.CLIPImageProcessorPil.from_pretrained(folder)
        opened = [Image.open(image) for image in images]
        given["pixel_values"] = processor(opened, return_tensors="pt").pixel_values
    theirs = transformers.LlavaForConditionalGeneration.from_pretrained(folder).eval()
    with torch.no_grad():
        state = theirs.model(**given).last_hidden_state[0, -1]
    return torch.nn.functional.normalize(state, dim=0).numpy()


def test_embeddings_are_transformers(folder, model, tmp_path):
    rng = np.random.default_rng(2)
    images = [str(tmp_path / f"{i}.png") for i in range(2)]
    for path in images:
        Image.fromarray(rng.integers(0, 255, (23, 40, 3), np.uint8)).save(path)
    queries = [([images[0]], "which color"), ([], "it is red"), (images, "")]
    embeddings = model.embed(queries, "which color is it")
    assert embeddings.shape == (3, model.config.model.decoder.width)
    for (given, said), embedding in zip(queries, embeddings, strict=True):
        expected = torch_embedding(
            folder, given, said or "NULL" * (not given), "which color is it."
        )
        assert embedding @ expected > 1 - 1e-6
    assert abs(embeddings[0] @ embeddings[1]) < 0.9999
    cut = model.embed(queries, "which color is it", dims=8)
    wanted = embeddings[:, :8] / np.linalg.norm(embeddings[:, :8], axis=1, keepdims=True)
    np.testing.assert_allclose(cut, wanted, atol=1e-6)


@pytest.mark.parametrize(
    ("queries", "options", "said"),
    [
        ([([], "red")], {"dims": 33}, "dims=33: the model's embeddings have 32"),
        ([([], "<image> red")], {}, "1 <image> marks but 0 images"),
        ([([], "red")], {"instruction": "an <image>"}, "instruction contains the special token"),
    ],
)
def test_bad_arguments_are_refused(model, queries, options, said):
    with pytest.raises(ConfigError, match=said):
        model.embed(queries, **options)


def test_a_checkpoint_without_output_head_embeds_and_does_not_generate(folder, model, tmp_path):
    """Qwen3-VL-Embedding-8B is published so, and its config.json does not say so."""
    shutil.copytree(folder, tmp_path / "hf")
    tensors = {}
    for path in (tmp_path / "hf").glob("*.safetensors"):
        tensors |= load_file(path)
        path.unlink()
    (tmp_path / "hf" / safetensors.INDEX).unlink()
    heads = [name for name in tensors if name.endswith("lm_head.weight")]
    assert len(heads) == 1
    del tensors[heads[0]]
    save_file(tensors, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    bare = jaxvlm.load(tmp_path / "hf", mesh=MESH)
    assert not bare.config.model.decoder.head and "decoder/embed/out" not in bare.params
    queries = [([], "which color"), ([], "it is red")]
    np.testing.assert_array_equal(bare.embed(queries), model.embed(queries))
    with pytest.raises(ConfigError, match="no output head"):
        bare.generate([], "what?")


# As Qwen3-VL's: content is text or a list of parts, an image is between two marks.
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
    base = chat_tokenizer.build(["a cat"], "bpe", 320)
    base.backend.add_special_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    special = chat_tokenizer.SPECIAL | {"eos_token": MARKS[1], "image_token": MARKS[3]}
    ours = chat_tokenizer.ChatTokenizer(base.backend, CHATML, special)
    ours.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    image = "".join(MARKS[2:])
    for said, instruction, told, parts in [
        ("a cat", " Find it ", "Find it.", ["a cat"]),
        ("<image>a cat", "Is it?", "Is it?", [None, "a cat"]),
        ("<image>", "", "Represent the user's input.", [None]),
        ("", "", "Represent the user's input.", ["NULL"]),
    ]:
        text = ours.render(tokenize.to_embed(said, instruction), add_generation_prompt=True)
        shown = "".join(part or image for part in parts)
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
