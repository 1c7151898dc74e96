"""Folders of encoders are loaded, give the embeddings of transformers, and are exported."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import jax
import numpy as np
import pytest
import tokenizers
from checkpoints import CLIP_PROCESSOR
from numerics import close_in_norm
from PIL import Image
from runs import environment
from tokenizers import models, normalizers, pre_tokenizers, processors

import jaxvlm
from jaxvlm.cli.main import run as cli
from jaxvlm.config import ConfigError, MeshConfig
from jaxvlm.data.errors import DataError
from jaxvlm.hf import safetensors

torch = pytest.importorskip("torch", reason="the oracle; Python 3.11 only")
transformers = pytest.importorskip("transformers", reason="the oracle")

MESH = MeshConfig(data=2, fsdp=2, tensor=2)
WORDS = ["a", "red", "blue", "circle", "square", "of", "the", "photo", "two", "big"]
TEXTS = ["a red circle", "blue", "the photo of two big red square", "big big", "a"]
DIMS = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2}
TEXT = DIMS | {"num_attention_heads": 2, "vocab_size": 16, "max_position_embeddings": 12}
VISION = DIMS | {"num_attention_heads": 4, "patch_size": 4}
SIGLIP_PROCESSOR = {
    "do_resize": True,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "image_processor_type": "SiglipImageProcessor",
    "resample": 3,
    "size": {"height": 16, "width": 16},
}
NAFLEX_PROCESSOR = {
    "image_processor_type": "Siglip2ImageProcessor",
    "image_mean": [0.4, 0.5, 0.6],
    "image_std": [0.5] * 3,
    "max_num_patches": 20,
    "patch_size": 4,
}


def write_tokenizer(folder, length):
    """Words between <s> and </s>; lower case."""
    special = ["<pad>", "<s>", "<unk>", "</s>"]
    vocabulary = {word: i for i, word in enumerate([*special, *WORDS])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [("<s>", 1), ("</s>", 3)]
    backend.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=ends)
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, model_max_length=length, **names
    )
    theirs.save_pretrained(folder)


def write(folder, kind):
    torch.manual_seed(5)
    text = TEXT | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 3}
    if kind == "clip":
        processor = CLIP_PROCESSOR
        config = transformers.CLIPConfig(
            text_config=text, vision_config=VISION | {"image_size": 16}, projection_dim=10
        )
    elif kind == "siglip":
        processor = SIGLIP_PROCESSOR
        config = transformers.SiglipConfig(
            text_config=text, vision_config=VISION | {"image_size": 16}
        )
    elif kind == "siglip2":
        processor = NAFLEX_PROCESSOR
        config = transformers.Siglip2Config(
            text_config=text, vision_config=VISION | {"num_patches": 16}
        )
    else:
        config = transformers.BertConfig(**text)
    model = transformers.AutoModel.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder, max_shard_size="20KB")
    write_tokenizer(folder, 12)
    if kind != "bert":
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    (folder / "notes_of_somebody.txt").write_text("carried along\n")
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("encoders")
    return {kind: write(root / kind, kind) for kind in ("clip", "siglip", "siglip2", "bert")}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    root, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(1)
    found = []
    for i, (w, h) in enumerate([(40, 23), (16, 50), (16, 16)]):
        Image.fromarray(rng.integers(0, 255, (h, w, 3), np.uint8)).save(root / f"{i}.png")
        found.append(str(root / f"{i}.png"))
    return found


def their_embeddings(folder, paths):
    """The embeddings of texts and images and the logits that transformers computes."""
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    pixels = processor([Image.open(path) for path in paths], return_tensors="pt")
    if model.config.model_type == "clip":
        inputs = tokenizer(TEXTS, padding=True, return_tensors="pt")
    else:
        inputs = tokenizer(TEXTS, padding="max_length", max_length=12, return_tensors="pt")
        del inputs["attention_mask"]  # as SigLIP's tokenizers do
    inputs.pop("token_type_ids", None)
    with torch.no_grad():
        out = model(**inputs, **pixels)
    return out.text_embeds.numpy(), out.image_embeds.numpy(), out.logits_per_image.numpy()


@pytest.mark.parametrize("kind", ["clip", "siglip", "siglip2"])
def test_embeddings_are_transformers(kind, folders, images, tmp_path, shows):
    """On a mesh of eight devices, in batches that do not divide; then exported and loaded again."""
    shows(kind, "export", *(["any resolution"] if kind == "siglip2" else []))
    text_embeddings, image_embeddings, logits = their_embeddings(folders[kind], images)
    model = jaxvlm.load(folders[kind], mesh=MESH)
    ours = model.encode_text(TEXTS, batch_size=3), model.encode_image(images, batch_size=2)
    close_in_norm(ours[0], text_embeddings, 1e-4)
    close_in_norm(ours[1], image_embeddings, 1e-4)
    close_in_norm(model.similarity(ours[1], ours[0]), logits, 1e-4)
    opened = [Image.open(path) for path in images]
    np.testing.assert_array_equal(model.encode_image(opened, batch_size=2), ours[1])

    model.export(tmp_path / "out")
    same_folder(folders[kind], tmp_path / "out")


def same_folder(source, written):
    """The same files, and for transformers the same tensors, none missing or unexpected."""
    names = {path.name for path in source.iterdir()}
    assert {path.name for path in written.iterdir()} == names
    assert safetensors.read_layout(written) == safetensors.read_layout(source)
    before = transformers.AutoModel.from_pretrained(source).state_dict()
    after, info = transformers.AutoModel.from_pretrained(written, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    for name, x in after.state_dict().items():
        assert torch.equal(x, before[name]), name


def test_changed_weights_are_exported_in_another_dtype(folders, tmp_path):
    model = jaxvlm.load(folders["bert"])
    model.params = jax.tree.map(lambda x: 2 * x, model.params)
    model.export(tmp_path / "out", "bfloat16")
    before = transformers.AutoModel.from_pretrained(folders["bert"]).state_dict()
    after = transformers.AutoModel.from_pretrained(tmp_path / "out")
    assert after.dtype == torch.bfloat16
    for name, x in after.state_dict().items():
        assert torch.equal(x, (2 * before[name]).bfloat16()), name


def test_truncated_texts_are_counted(folders, caplog):
    model = jaxvlm.load(folders["bert"])
    long = ("a " * 30).strip()
    with caplog.at_level(logging.WARNING, "jaxvlm"):
        embeddings = model.encode_text([long, "a", ("a " * 10).strip()])
    assert "1 of 3 texts are longer than 12 tokens" in caplog.text
    np.testing.assert_array_equal(embeddings[0], embeddings[2])
    with pytest.raises(ConfigError, match="takes a list of texts"):
        model.encode_text("a")
    with pytest.raises(ConfigError, match="one tower has no logits"):
        model.similarity(embeddings, embeddings)
    assert model.encode_text([]).shape == (0, 24)


def test_embed_writes_embeddings(folders, images, tmp_path, capsys):
    """The command line, also with torch blocked, writes the embeddings of the Python API."""
    model = jaxvlm.load(folders["clip"])
    expected = np.concatenate([model.encode_text(TEXTS), model.encode_image(images)])
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS[1:]) + "\n")
    (tmp_path / "images.txt").write_text("\n".join(images[1:]) + "\n")
    args = [
        "embed",
        f"--checkpoint={folders['clip']}",
        f"--text={TEXTS[0]}",
        f"--texts={tmp_path / 'texts.txt'}",
        f"--image={images[0]}",
        f"--images={tmp_path / 'images.txt'}",
        "--json",
    ]
    assert cli([*args, f"--output={tmp_path / 'out.jsonl'}"]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said == {
        "texts": 5,
        "images": 3,
        "dims": 10,
        "columns": 10,
        "kind": "float32",
    }
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line.get("text") for line in lines] == [*TEXTS, None, None, None]
    assert [line.get("image") for line in lines[5:]] == images
    np.testing.assert_allclose([line["embedding"] for line in lines], expected, atol=1e-6)

    code = "import sys; sys.modules['torch'] = None; from jaxvlm.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *args, f"--output={tmp_path / 'out.npy'}"],
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), expected, atol=1e-6)


def test_bad_input_is_one_line(folders, images, tmp_path, capsys):
    def said(*args):
        assert cli(["embed", *args]) == 2
        return capsys.readouterr().err

    out, clip = f"--output={tmp_path / 'x.npy'}", f"--checkpoint={folders['clip']}"
    assert "--output=FILE.npy, FILE.npz" in said(clip, "--text=a", "--output=x.txt")
    assert "embed needs texts" in said(clip, out)
    (tmp_path / "gap.txt").write_text("a\n\nb\n")
    assert "--text=: the text is empty" in said(clip, out, "--text=")
    assert "line 2 is empty" in said(clip, out, f"--texts={tmp_path / 'gap.txt'}")
    assert "none.txt can't be read" in said(clip, out, f"--texts={tmp_path / 'none.txt'}")
    assert "encodes texts, not images" in said(
        f"--checkpoint={folders['bert']}", out, f"--image={images[0]}"
    )
    (tmp_path / "no.png").write_text("not an image")
    assert "no.png" in said(clip, out, f"--image={tmp_path / 'no.png'}")
    assert "batch_size=0" in said(clip, out, "--text=a", "--batch_size=0")
    assert cli(["generate", clip, "--prompt=a"]) == 2
    assert "computes embeddings" in capsys.readouterr().err
    assert not (tmp_path / "x.npy").exists()


def test_files_that_do_not_fit_are_named(folders, tmp_path):
    import shutil

    def changed(kind, name, **fields):
        folder = tmp_path / f"{name}-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(folders[kind], folder)
        said = json.loads((folder / name).read_text()) if (folder / name).is_file() else {}
        (folder / name).write_text(json.dumps(said | fields))
        return folder

    with pytest.raises(ConfigError, match="returns images of 8 pixels, but the model takes 16"):
        size = {"height": 8, "width": 8}
        jaxvlm.load(changed("siglip", "preprocessor_config.json", size=size))
    with pytest.raises(ConfigError, match="returns images of any pixels, but the model takes 16"):
        jaxvlm.load(changed("siglip", "preprocessor_config.json", **NAFLEX_PROCESSOR))
    with pytest.raises(DataError, match="no pad_token"):
        jaxvlm.load(changed("bert", "tokenizer_config.json", pad_token="<none>"))
    with pytest.raises(
        ConfigError, match=r"14 tokens, but .* 13; .* resize_token_embeddings\(14\)"
    ):
        jaxvlm.load(changed("bert", "config.json", vocab_size=13))
    with pytest.raises(ConfigError, match=r"missing: encoder\.layer\.2\.attention\.output"):
        jaxvlm.load(changed("bert", "config.json", num_hidden_layers=3))
