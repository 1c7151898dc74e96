"""``jaxvlm embed``: every format, truncation, quantization; an interrupted run resumes."""

from __future__ import annotations

import csv
import functools
import importlib.util
import json
import shutil
import tarfile

import numpy as np
import pytest
from checkpoints import write_llava
from PIL import Image
from runs import refused
from safetensors.numpy import load_file
from test_encoders import WORDS, write

import jaxvlm
from jaxvlm.cli.main import run as cli
from jaxvlm.config import ConfigError
from jaxvlm.data.pairs.examples import Item
from jaxvlm.inference import embed_corpus, examples, items
from jaxvlm.inference.resumable_array import ResumableArray

pytest.importorskip("torch", reason="makes the weights; Python 3.11 only")
TEXTS = [f"{a} {b} {c}" for a in ("a", "the") for b in WORDS[1:4] for c in WORDS[3:6]]
E = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("encoder") / "bert", "bert")


@pytest.fixture(scope="module")
def model(folder):
    return jaxvlm.load(folder)


@pytest.fixture(scope="module")
def embeddings(model):
    return model.encode_text(TEXTS)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("items") / "items.jsonl"
    lines = [json.dumps({"id": f"n{i}", "text": text}) for i, text in enumerate(TEXTS)]
    path.write_text("\n".join(lines) + "\n\n")
    return path


@pytest.fixture
def embed(model, folder, monkeypatch, capsys):
    """The command, in this process, with the model loaded once."""
    monkeypatch.setattr("jaxvlm.inference.load.load", lambda *args, **kwargs: model)

    def call(*args):
        code = cli(["embed", f"--checkpoint={folder}", "--json", *args])
        said = capsys.readouterr()
        return code, json.loads(said.out.splitlines()[-1]) if not code else said.err

    return call


def read(path):
    """What other libraries read: (embeddings, records, ranges)."""
    if path.suffix == ".npy":
        return np.load(path), None, None
    if path.suffix in (".npz", ".safetensors"):
        held = np.load(path) if path.suffix == ".npz" else load_file(path)
        return held["embeddings"], None, held.get("ranges")
    if path.suffix == ".parquet":
        pq = pytest.importorskip("pyarrow.parquet", reason="pip install 'jaxvlm[parquet]'")
        rows = pq.read_table(path).to_pylist()
    else:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    return np.asarray([row.pop("embedding") for row in rows]), rows, None


@pytest.mark.parametrize("suffix", ["npy", "npz", "safetensors", "jsonl", "parquet"])
def test_every_format_holds_the_embeddings(embed, file, embeddings, tmp_path, suffix):
    if suffix == "parquet":
        pytest.importorskip("pyarrow", reason="pip install 'jaxvlm[parquet]'")
    out = tmp_path / f"out.{suffix}"
    code, said = embed(f"--input={file}", f"--output={out}", "--part_size=7")
    assert code == 0 and said["texts"] == len(TEXTS) and said["dims"] == E
    held, rows, _ = read(out)
    np.testing.assert_allclose(held, embeddings, atol=2e-6)
    if rows is not None:
        assert rows == [{"id": f"n{i}", "text": text} for i, text in enumerate(TEXTS)]
    assert [p.name for p in tmp_path.iterdir()] == [out.name]  # no temporary file is left


def test_truncated_embeddings_have_unit_length(embed, file, embeddings, tmp_path):
    out = tmp_path / "out.npy"
    assert embed(f"--input={file}", f"--output={out}", "--dims=8")[0] == 0
    wanted = embeddings[:, :8] / np.linalg.norm(embeddings[:, :8], axis=1, keepdims=True)
    np.testing.assert_allclose(np.load(out), wanted, atol=1e-5)
    util = pytest.importorskip("sentence_transformers.util", reason="the oracle")
    theirs = util.normalize_embeddings(util.truncate_embeddings(torch_of(embeddings), 8))
    np.testing.assert_allclose(np.load(out), theirs.numpy(), atol=1e-5)


def torch_of(x):
    return pytest.importorskip("torch", reason="the oracle's arrays").from_numpy(x)


def test_quantized_embeddings_are_sentence_transformers(embed, file, tmp_path):
    theirs = pytest.importorskip("sentence_transformers.quantization", reason="the oracle")
    assert embed(f"--input={file}", f"--output={tmp_path / 'f.npy'}")[0] == 0
    x = np.load(tmp_path / "f.npy")
    ranges = np.stack([x.min(axis=0), x.max(axis=0)])
    suffixes = ["npy", "npz", "safetensors", "jsonl"]
    suffixes += ["parquet"] if importlib.util.find_spec("pyarrow") else []
    for kind, suffix in [("binary", "npz"), ("ubinary", "safetensors")] + [
        ("int8", suffix) for suffix in suffixes
    ]:
        out = tmp_path / f"{kind}.{suffix}"
        given = (f"--output={out}", f"--quantize={kind}", "--part_size=5")
        code, said = embed(f"--input={file}", *given)
        assert (
            code == 0 and said["kind"] == kind and said["columns"] == (E if kind == "int8" else 3)
        )
        np.testing.assert_array_equal(read(out)[0], theirs.quantize_embeddings(x, kind))
        if kind == "int8":  # and a query uses the ranges of the corpus
            one = tmp_path / "one.npy"
            given = (f"--output={one}", "--quantize=int8", f"--ranges={out}")
            assert embed("--text=a big photo", *given)[0] == 0
            assert embed("--text=a big photo", f"--output={tmp_path / 'g.npy'}")[0] == 0
            query = np.load(tmp_path / "g.npy")
            expected = theirs.quantize_embeddings(query, "int8", ranges=ranges)
            np.testing.assert_array_equal(np.load(one), expected)


def test_an_interrupted_run_resumes(embed, model, file, embeddings, tmp_path, monkeypatch):
    out, begun = tmp_path / "out.npy", tmp_path / "out.npy.parts"
    made, real = [], embed_corpus.embed_items

    def failing(model, some, *args):
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append(len(some))
        return real(model, some, *args)

    monkeypatch.setattr(embed_corpus, "embed_items", failing)
    given = (f"--input={file}", f"--output={out}", "--part_size=4")
    assert embed(*given)[0] == 130 and not out.exists()
    assert made == [4, 4, 4] and len(list(begun.glob("*.npy"))) == 3
    (begun / "000001.npy").write_bytes((begun / "000001.npy").read_bytes()[:200])  # truncated
    before = (begun / "000002.npy").read_bytes()
    for other, named in (
        (("--dims=8", *given), "other settings"),
        ((f"--input={file}", f"--output={out}", "--part_size=5"), "other settings"),
        (("--text=one more", *given), "other items"),
    ):
        code, line = embed(*other)
        assert code == 2 and named in line and f"{begun} holds" in line and line.count("\n") == 1
    made.clear()
    monkeypatch.setattr(embed_corpus, "embed_items", lambda *args: made.append(1) or real(*args))
    assert (begun / "000002.npy").read_bytes() == before
    assert embed(*given)[0] == 0 and len(made) == 3  # one repaired, two that were missing
    np.testing.assert_allclose(np.load(out), embeddings, atol=2e-6)
    assert not begun.exists()


def test_other_weights_and_images_change_the_identity(model, folder, tmp_path):
    how = embed_corpus.EmbedConfig()
    image = tmp_path / "a.png"
    Image.new("RGB", (4, 4)).save(image)
    some = [Item("a"), Item("", str(image))]
    first = embed_corpus.identity(model, some, how, str(folder))
    assert first == embed_corpus.identity(model, some, how, str(folder))
    Image.new("RGB", (40, 40)).save(image)
    second = embed_corpus.identity(model, some, how, str(folder))
    assert [name for name in first if first[name] != second[name]] == ["items"]
    name = min(model.params)
    changed = model.params | {name: model.params[name].at[0].add(1e-3)}
    other = type(model)(model.source, model.model, changed, model.tokenizer, None)
    third = embed_corpus.identity(other, some, how, str(folder))
    assert [name for name in first if second[name] != third[name]] == ["model"]
    small = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(folder, tmp_path / "m", ignore=small)
    (tmp_path / "m" / "tokenizer_config.json").write_text("{}")
    fourth = embed_corpus.identity(model, some, how, str(tmp_path / "m"))
    assert fourth["model"] != second["model"]


def test_parts_are_one_array(tmp_path):
    x = np.random.default_rng(0).normal(size=(23, 3)).astype(np.float32)
    parts = ResumableArray(tmp_path / "p", x.shape, 5)
    assert parts.begin({"a": "1"}) == [False] * 5 and not parts.folder.exists()
    for i, some in enumerate(parts.slices):
        parts.write(i, x[some])
    again = ResumableArray(tmp_path / "p", x.shape, 5)
    assert again.begin({"a": "1"}) == [True] * 5 and len(again) == 23
    np.testing.assert_array_equal(np.asarray(again), x)
    np.testing.assert_array_equal(again[3:17], x[3:17])
    where = np.asarray([22, 0, 7, 7, 4])
    np.testing.assert_array_equal(again[where], x[where])
    with pytest.raises(ConfigError, match="with other a; use the same as that run"):
        again.begin({"a": "2"})
    (tmp_path / "p" / "made_from.json").write_text("{")
    with pytest.raises(ConfigError, match="delete that folder"):
        again.begin({"a": "1"})


def test_bad_input_is_one_line(embed, file, tmp_path):
    out = f"--output={tmp_path / 'x.npy'}"

    said = functools.partial(refused, embed)

    assert "written to --output=FILE.npy" in said("--text=a", "--output=x.csv")
    assert "dims=25: the model's embeddings have 24" in said("--text=a", out, "--dims=25")
    assert "quantize=int4" in said("--text=a", out, "--quantize=int4")
    assert "from one embedding" in said("--text=a", out, "--quantize=int8")
    assert "part_size=0" in said("--text=a", out, "--part_size=0")
    assert "--ranges=none.npy" in said("--text=a", out, "--quantize=int8", "--ranges=none.npy")
    np.save(tmp_path / "r.npy", np.zeros((2, 5), np.float32))
    given = ("--text=a", out, f"--ranges={tmp_path / 'r.npy'}")
    assert "has 5 dims, but the embeddings have 24" in said(*given, "--quantize=int8")
    assert "add --quantize=int8" in said(*given)
    np.save(tmp_path / "r.npy", np.zeros((3, 5), np.float32))
    assert "have shape [2, E]" in said(*given)
    for name, text, line in (
        ("a.jsonl", '{"text": "a"}\n{', "a.jsonl:2: "),
        ("b.jsonl", '{"text": ""}\n', "b.jsonl:1: neither text nor an image"),
        ("b.jsonl", '{"id": 1, "text": "a"}\n{"id": 1, "text": "b"}\n', "id '1' occurs twice"),
        ("c.jsonl", '{"text": 3}\n', "c.jsonl:1: 'text' is not text"),
        ("d.jsonl", '{"text": "<image>a"}\n', "d.jsonl:1: placeholders and images differ"),
        ("e.csv", "text\na,b\n", "e.csv:2: more cells than columns"),
        ("f.csv", "", "f.csv: contains no record"),
        ("g.txt", "a", "g.txt: not a file of records"),
    ):
        (tmp_path / name).write_text(text)
        assert line in said(out, f"--input={tmp_path / name}")
    if not importlib.util.find_spec("pyarrow"):
        assert "pip install 'jaxvlm[parquet]'" in said("--text=a", "--output=x.parquet")
    assert not [p for p in tmp_path.iterdir() if p.name.startswith("x.")]


def test_a_missing_package_is_named(embed, monkeypatch):
    find = importlib.util.find_spec

    def hidden(name, *rest):
        return None if name == "pyarrow" else find(name, *rest)

    monkeypatch.setattr("jaxvlm.inference.embedding_files.importlib.util.find_spec", hidden)
    code, line = embed("--text=a", "--output=x.parquet")
    assert code == 2 and "pip install 'jaxvlm[parquet]'" in line


def test_an_encoder_reads_instructions_as_prompts(embed, model, tmp_path):
    rows = [["a circle", ""], ["a square", "photo of "]]
    with (tmp_path / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["text", "instruction"], *rows])
    out = tmp_path / "x.npy"
    given = (f"--input={tmp_path / 'a.csv'}", f"--output={out}", "--instruction=the ")
    assert embed(*given)[0] == 0
    expected = model.encode_text(["the a circle", "photo of a square"])
    np.testing.assert_allclose(np.load(out), expected, atol=1e-6)
    both = [Item("a circle", "cat.png")]
    with pytest.raises(ConfigError, match=r"cat\.png: it has an image and a text"):
        items.embed_items(model, both)


@pytest.mark.long  # a decoder is compiled
def test_a_decoder_takes_images_and_texts_together(data, tmp_path, capsys):
    folder = write_llava(tmp_path / "hf", data, "float32")
    vlm = jaxvlm.load(folder)
    for i in range(3):
        Image.new("RGB", (20, 20), (80 * i, 10, 10)).save(tmp_path / f"{i}.png")
    rows = [
        {"text": "which color", "image": "0.png"},
        {"text": "is it red"},
        {"image": "1.png", "instruction": "which color is it"},
        {"text": "it <image> is", "image": "2.png"},
        {"text": "it is a color"},
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    args = [f"--input={tmp_path / 'in.jsonl'}", "--instruction=is it", "--dims=8", "--json"]
    out = tmp_path / "out.npy"
    assert cli(["embed", f"--checkpoint={folder}", f"--output={out}", *args]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (said["texts"], said["images"], said["dims"]) == (2, 3, 8)
    held = np.load(out)
    for row, embedding in zip(rows, held, strict=True):
        images = [str(tmp_path / row["image"])] if "image" in row else []
        told = row.get("instruction", "is it")
        (expected,) = vlm.embed([(images, row.get("text", ""))], told, 8)
        np.testing.assert_allclose(embedding, expected, atol=1e-5)


@pytest.mark.long  # an encoder is compiled
def test_images_in_a_tar_are_embedded(tmp_path, capsys):
    """Items, examples and a grid from a tar's members, as from files."""
    folder = write(tmp_path / "clip", "clip")
    rng = np.random.default_rng(0)
    with tarfile.open(tmp_path / "pairs.tar", "w") as tar:
        for i, word in enumerate(WORDS[1:5]):
            image = rng.integers(0, 255, (20, 16 + i, 3), np.uint8)
            Image.fromarray(image).save(tmp_path / f"{i}.png")
            (tmp_path / f"{i}.txt").write_text(word)
            for suffix in ("png", "txt"):
                tar.add(tmp_path / f"{i}.{suffix}", f"{i}.{suffix}")
    grid, out = tmp_path / "predictions.png", tmp_path / "out.jsonl"
    given = [f"--checkpoint={folder}", f"--data={tmp_path / 'pairs.tar'}", "--json"]
    assert cli(["eval", *given, f"--prediction_grid={grid}", "--ks=1,4"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["recall@4"] == 1
    with Image.open(grid) as drawn:
        assert drawn.size == (5 * 190 + 8, 4 * 212 + 8)
    assert cli(["mine", *given, f"--output={out}", "--num_negatives=2"]) == 0
    clip = jaxvlm.load(folder)
    files = [str(tmp_path / f"{i}.png") for i in range(4)]
    score = clip.encode_image(files) @ clip.encode_text(list(WORDS[1:5])).T
    np.fill_diagonal(score, -np.inf)
    found = examples.read(str(out))
    for row, example in zip(score, found, strict=True):
        hard = [WORDS[1:5][n] for n in np.argsort(-row)[:2]]
        assert [item.words for item in example.negatives] == hard
    again = items.embed_items(clip, [example.query for example in found])
    np.testing.assert_allclose(again, clip.encode_image(files), atol=1e-6)
