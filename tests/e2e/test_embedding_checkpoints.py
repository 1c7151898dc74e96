"""Embeddings trained from one checkpoint, exported again, and from two checkpoints."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from PIL import Image
from runs import write_data
from test_encoders import write

import jaxvlm
from jaxvlm.cli.main import run as cli
from jaxvlm.config import ConfigError, default_config

transformers = pytest.importorskip("transformers", reason="the oracle")
pytestmark = pytest.mark.long
WORDS = ("a red circle", "blue", "the photo of two", "big big", "two blue", "red of", "a", "square")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("towers")
    return {kind: write(root / kind, kind) for kind in ("clip", "siglip", "bert")}


@pytest.fixture(scope="module")
def captions(tmp_path_factory):
    folder = tmp_path_factory.mktemp("captions")
    write_data(folder, 8)
    lines = ({"query_image": f"{i}.png", "positive": text} for i, text in enumerate(WORDS))
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def recipe(path):
    config = default_config()
    config.loss.name, config.embedder = "info_nce", "dual"
    config.data.train = config.data.eval = str(path)
    config.data.batch_size, config.data.max_length, config.data.buckets = 8, 12, 1
    config.pair_loss.temperature, config.grad_cache.query_mini_batch = 0.0, 1
    config.optim.learning_rate, config.optim.warmup_steps, config.steps = 1e-2, 1, 3
    config.log_every, config.tensorboard = 1, False
    return config


def test_a_checkpoint_is_trained_and_written_back(folders, captions, tmp_path, capsys):
    config = recipe(captions)
    config.dual.checkpoint, config.optim.frozen = str(folders["clip"]), ("vision/*",)
    run, out = tmp_path / "run", tmp_path / "out"
    jaxvlm.Trainer(config, run).fit()
    assert cli(["export", f"--workdir={run}", f"--output={out}"]) == 0
    trained, exported, source = (jaxvlm.load(x) for x in (run, out, folders["clip"]))
    texts = [model.encode_text(list(WORDS)) for model in (trained, exported, source)]
    np.testing.assert_allclose(texts[0], texts[1], atol=1e-6)
    assert np.abs(texts[1] - texts[2]).max() > 1e-3
    theirs = transformers.CLIPModel.from_pretrained(out)
    kept = transformers.CLIPModel.from_pretrained(folders["clip"])
    for (name, a), (_, b) in zip(
        theirs.vision_model.named_parameters(), kept.vision_model.named_parameters()
    ):
        assert bool((a == b).all()), name
    config.dual.text.width = 99
    with pytest.raises(ConfigError, match=r"dual\.text\.width=99, but the checkpoint says 24"):
        jaxvlm.Trainer(config, tmp_path / "other")


def test_towers_of_two_checkpoints(folders, captions, tmp_path, capsys):
    config = recipe(captions)
    siglip = tmp_path / "siglip"  # as saved by a processor of images and texts
    shutil.copytree(folders["siglip"], siglip)
    said = json.loads((siglip / "preprocessor_config.json").read_text())
    said["processor_class"] = "SiglipProcessor"
    (siglip / "preprocessor_config.json").write_text(json.dumps(said))
    config.dual.vision_checkpoint = str(siglip)
    config.dual.text_checkpoint = str(folders["bert"])
    config.dual.embed_dim, config.optim.frozen = 20, ("text/*",)
    made = jaxvlm.Trainer(config, tmp_path / "run")
    result = made.fit()
    assert result["step"] == 3 and "recall@1" in result
    source = jaxvlm.load(folders["bert"])
    for path, x in source.params.items():
        if path.startswith("text/"):  # frozen, and read from the given checkpoint
            np.testing.assert_array_equal(np.asarray(made.state.frozen[path]), np.asarray(x))
    vision = jaxvlm.load(folders["siglip"]).params["vision/stack/blocks/attn/wq"]
    moved = np.abs(np.asarray(made.state.params["vision/stack/blocks/attn/wq"] - vision)).max()
    assert 1e-4 < moved < 0.1  # three steps of 1e-2
    again = jaxvlm.load(tmp_path / "run")
    assert again.encode_text(["red"]).shape == (1, 20)
    assert cli(["export", f"--workdir={tmp_path / 'run'}", f"--output={tmp_path / 'out'}"]) == 2
    assert "does not come from one Hugging Face" in capsys.readouterr().err
    args = ["export", f"--workdir={tmp_path / 'run'}", f"--output={tmp_path / 'out'}"]
    assert cli([*args, "--format=sentence_transformers"]) == 0
    theirs = pytest.importorskip("sentence_transformers", reason="the oracle")
    loaded = theirs.SentenceTransformer(str(tmp_path / "out"))
    seen = [Image.open(captions.parent / f"{i}.png") for i in range(3)]
    for ours, other in (
        (again.encode_text(list(WORDS)), loaded.encode(list(WORDS))),
        (again.encode_image(seen), loaded.encode(seen)),
    ):
        assert ours.shape[1] == 20
        np.testing.assert_allclose(ours, other, atol=1e-5)
    args[2] = f"--output={tmp_path / 'half'}"
    assert cli([*args, "--format=sentence_transformers", "--dtype=bfloat16"]) == 0
    half = theirs.SentenceTransformer(str(tmp_path / "half"))
    np.testing.assert_allclose(again.encode_image(seen), half.encode(seen), atol=3e-2)
    config.dual.checkpoint = str(folders["clip"])
    with pytest.raises(ConfigError, match="has both towers"):
        jaxvlm.Trainer(config, tmp_path / "other")
