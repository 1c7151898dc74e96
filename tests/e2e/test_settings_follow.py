"""What a run was trained with holds in every later command, in any folder, without a flag."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import jax
import numpy as np
import pytest
from test_embedding_runs import scratch
from test_encoders import write

import jaxvlm
from jaxvlm.checkpoint import run_changes, run_record
from jaxvlm.cli.main import run as cli
from jaxvlm.config import (
    Config,
    ConfigError,
    DataConfig,
    LossConfig,
    PairDataConfig,
    default_config,
    from_config_dict,
)
from jaxvlm.data.pairs.examples import Item
from jaxvlm.inference import embedding_evaluator, input_types
from jaxvlm.inference.items import EmbedConfig, embed_items

QUERIES = ["a red", "Blue", "two big blue square", "the photo of red", "big big circle", "of the"]
DOCUMENTS = ["red circle", "a blue a blue photo", "square two", "photo", "circle of red", "big"]
SAID = ("", "a ", "photo of ", "two ")


def drawn(kind, seed):
    """Settings of a run of ``kind`` that change what an item becomes, as {path: value}."""
    rng = np.random.default_rng([seed, len(kind)])

    def one(*values):
        return values[rng.integers(len(values))]

    settings = {
        "data.pairs.query_instruction": one(*SAID[1:]),
        "data.pairs.document_instruction": one(*SAID),
        "data.column_mapping": (("asked", "query"), ("told", "positive")),
        "data.tsv_quoting": one(True, False),
        "data.ignored_fields": ("note",),
        "pair_loss.similarity": one("cosine", "dot"),
        "pair_loss.matryoshka_dims": one((), (8, 16)),
    }
    if kind == "text":  # one limit, which a SentenceTransformer can have too
        return settings | {"data.max_length": one(6, 7, 8, 12)}
    lengths = {f"data.pairs.max_{n}_length": int(rng.integers(24, 40)) for n in input_types.NAMES}
    own = {"embedding.normalize": one(True, False), "embedding.pool": one("last", "mean", "first")}
    return settings | lengths | own | {"embedding.dim": one(0, 16)}


def started(kind, settings, folder, monkeypatch):
    """A run of one step, started in ``folder`` with relative paths; returns its workdir."""
    quote = '"' if settings["data.tsv_quoting"] else ""
    rows = [
        "asked\ttold\tnote",
        *(f"{quote}{q}{quote}\t{d}\tx" for q, d in zip(QUERIES, DOCUMENTS)),
    ]
    (folder / "pairs.tsv").write_text("\n".join(rows) + "\n")
    monkeypatch.chdir(folder)
    config = scratch("pairs.tsv", "vlm" if kind == "vlm" else "dual")
    if kind == "text":
        config.dual = default_config().dual
        config.dual.checkpoint = str(write(folder / "bert", "bert"))
    config.steps, config.optim.warmup_steps, config.data.batch_size = 1, 0, 6
    config.optim.learning_rate, config.data.eval = 3e-2, "pairs.tsv"
    config.pair_loss.temperature = 0.1
    with config.unlocked():
        config.update_from_flattened_dict(settings)
    jaxvlm.Trainer(config, folder / "run", jax.devices()[:1]).fit()
    return folder / "run"


def own_embeddings(workdir):
    """The embeddings of queries and documents as the run's own evaluation computes them."""
    model = jaxvlm.load(workdir)
    config = embedding_evaluator.run_of(model)
    images = model.image_format if hasattr(model, "image_format") else model.image_processor
    collator = embedding_evaluator.collator_of(config, model.tokenizer, images)
    evaluator = embedding_evaluator.embedding_evaluator(config, model.model, collator)
    return model, [evaluator.embeddings(model.params, column) for column in input_types.NAMES]


def metrics(capsys, *args):
    capsys.readouterr()
    assert cli([*args, "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def follows(kind, seed, tmp_path, monkeypatch, capsys):
    """Every command in another folder gives the run's own embeddings and metrics."""
    settings = drawn(kind, seed)
    (tmp_path / "start").mkdir()
    workdir = started(kind, settings, tmp_path / "start", monkeypatch)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    model, own = own_embeddings(workdir)
    near = {"rtol": 0, "atol": 1e-6 * max(1, np.abs(own[0]).max(), np.abs(own[1]).max())}

    where = [f"--checkpoint={workdir}"]
    for name, texts, expected in zip(input_types.NAMES, (QUERIES, DOCUMENTS), own, strict=True):
        given = [f"--text={text}" for text in texts]
        out = f"--output={name}.npy"
        assert cli(["embed", *where, *given, out, f"--input_type={name}"]) == 0
        np.testing.assert_allclose(np.load(f"{name}.npy"), expected, **near)
    capsys.readouterr()
    assert cli(["embed", *where, "--text=a", "--output=x.npy"]) == 2
    assert "--input_type=query or --input_type=document" in capsys.readouterr().err

    data = f"--data={tmp_path / 'start' / 'pairs.tsv'}"
    as_trained = metrics(capsys, "eval", *where)
    ks = "--ks=1,5,10" if len(DOCUMENTS) >= 10 else "--ks=1,5"
    again = metrics(capsys, "eval", *where, data, "--retrieval", ks)
    for name, value in again.items():
        if "random/" not in name:  # of documents in another order
            assert value == pytest.approx(as_trained[name], abs=1e-6), name
    assert {n for n in as_trained if "@" in n and "@10" not in n} <= set(again)

    metrics(capsys, "mine", *where, data, "--output=mined.jsonl", "--scores", "--num_negatives=2")
    unit = settings["pair_loss.similarity"] == "cosine"
    q, d = (x / np.linalg.norm(x, axis=1, keepdims=True) if unit else x for x in own)
    for line in pathlib.Path("mined.jsonl").read_text().splitlines():
        row = json.loads(line)
        found = [DOCUMENTS.index(text) for text in [row["positive"], *row["negatives"]]]
        scores = (d @ q[QUERIES.index(row["query"])])[found]
        np.testing.assert_allclose(row["scores"], scores, atol=2e-6 * max(1, np.abs(scores).max()))
    return workdir, model, own


def exported_folder_follows(workdir, own, tmp_path):
    """SentenceTransformer(FOLDER) gives the run's embeddings, and jaxvlm with the folder too."""
    theirs = pytest.importorskip("sentence_transformers", reason="the oracle")
    out = tmp_path / "folder"
    args = ["export", f"--workdir={workdir}", f"--output={out}", "--format=sentence_transformers"]
    assert cli(args) == 0
    loaded = theirs.SentenceTransformer(str(out))
    config = run_record.read_config(workdir)
    assert loaded.similarity_fn_name == config.pair_loss.similarity
    for encode, texts, expected in (
        (loaded.encode_query, QUERIES, own[0]),
        (loaded.encode_document, DOCUMENTS, own[1]),
    ):
        np.testing.assert_allclose(encode(texts), expected, atol=2e-6)
    again = jaxvlm.load(out)
    for name, texts, expected in zip(input_types.NAMES, (QUERIES, DOCUMENTS), own, strict=True):
        how = EmbedConfig().of_type(input_types.choose(again.input_types, name))
        np.testing.assert_allclose(
            embed_items(again, [Item.of(t) for t in texts], how), expected, atol=2e-6
        )


@pytest.mark.long
def test_a_text_encoders_run(tmp_path, monkeypatch, capsys):
    workdir, _, own = follows("text", 0, tmp_path, monkeypatch, capsys)
    exported_folder_follows(workdir, own, tmp_path)


def test_a_vlms_run(tmp_path, monkeypatch, capsys):
    follows("vlm", 0, tmp_path, monkeypatch, capsys)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.parametrize("kind", ["text", "vlm"])
def test_settings_drawn_at_random(kind, seed, tmp_path, monkeypatch, capsys):
    workdir, _, own = follows(kind, seed, tmp_path, monkeypatch, capsys)
    if kind == "text":
        exported_folder_follows(workdir, own, tmp_path)


def test_relative_data_are_found_or_both_places_named(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    config = from_config_dict(default_config())
    data = dataclasses.replace(
        config.data, train="here.jsonl", eval="easy-vqa:test", image_root="i"
    )
    (tmp_path / "run").mkdir()
    run_record.write_config(tmp_path / "run", dataclasses.replace(config, data=data), "cpu")
    (tmp_path / "i").mkdir()
    (tmp_path / "elsewhere").mkdir()
    assert run_changes.read_config_to_use("run").data == data
    monkeypatch.chdir(tmp_path / "elsewhere")
    found = run_changes.read_config_to_use(tmp_path / "run").data
    assert found == dataclasses.replace(data, image_root=str(tmp_path / "i"))
    assert (
        f"neither in this folder nor in {tmp_path}" in caplog.text and "here.jsonl" in caplog.text
    )
    (tmp_path / "here.jsonl").touch()
    assert run_changes.read_config_to_use(tmp_path / "run").data.train == str(
        tmp_path / "here.jsonl"
    )
    assert "is read in this folder" not in caplog.text
    (tmp_path / "elsewhere" / "here.jsonl").touch()  # this folder's comes first, and a line says so
    assert run_changes.read_config_to_use(tmp_path / "run").data.train == "here.jsonl"
    line = (
        f"config.data.train=here.jsonl is read in this folder; {tmp_path / 'here.jsonl'} is another"
    )
    assert caplog.text.count(line) == 1
    started = dataclasses.replace(config, data=data)
    assert [line in said for said in run_changes.changed_settings(tmp_path / "run", started)] == [
        True
    ]
    (tmp_path / "elsewhere" / "here.jsonl").unlink()
    (tmp_path / "elsewhere" / "here.jsonl").symlink_to(tmp_path / "here.jsonl")
    assert run_changes.changed_settings(tmp_path / "run", started) == [], "one file"


def test_a_folders_prompts_are_its_input_types():
    def chosen(settings, name="", instruction=None):
        return input_types.choose(input_types.of_folder(settings), name, instruction).instruction

    e5 = {"prompts": {"query": "query: ", "passage": "passage: "}, "default_prompt_name": None}
    assert chosen(e5, "query") == "query: " and chosen(e5, "document") == "passage: "
    assert chosen(e5, "", "x: ") == "x: " and chosen({}) == ""
    default = {"prompts": {"query": "q", "all": "a"}, "default_prompt_name": "all"}
    assert chosen(default, "document") == "a"
    with pytest.raises(ConfigError, match="instruction of queries is 'q', that of documents 'a'"):
        chosen(default)
    assert chosen({"prompts": {"all": "a"}, "default_prompt_name": "all"}) == "a"
    for settings, said in (
        ({"prompts": ["a"]}, "prompts must map names to texts"),
        ({"prompts": {"a": "b"}, "default_prompt_name": "c"}, "'c' is none of its prompts, a"),
    ):
        with pytest.raises(ConfigError, match=said):
            input_types.of_folder(settings)


@pytest.mark.parametrize(
    ("settings", "run", "said"),
    [
        ({}, {}, ()),
        ({"prompts": {"query": "", "passage": "p: "}}, {}, ("prompt for each document is 'p: '",)),
        ({"prompts": {"query": "q: "}}, {"query_instruction": "q: "}, ()),
        ({"similarity_fn_name": "dot"}, {}, ("similarity_fn_name='dot', and this run by",)),
        ({"similarity_fn_name": "euclidean"}, {}, ("similarity_fn_name='euclidean'",)),
        ({"prompts": {}}, {"max_query_length": 8}, ("to 64 tokens, and this run each query to 8",)),
    ],
)
def test_what_a_run_does_otherwise_than_its_folder_is_said(settings, run, said, tmp_path):
    """At its start, but for the length, and where an export would keep the folder's files."""
    config = Config(loss=LossConfig(name="info_nce"), data=DataConfig(pairs=PairDataConfig(**run)))
    lines = input_types.lines_of_folder(settings, config)
    assert len(lines) == len(said) - ("max_query_length" in run)
    assert all(part in line for part, line in zip(said, lines))
    path = tmp_path / "config_sentence_transformers.json"
    path.write_text(json.dumps(settings))
    input_types.check_same_as_folder(tmp_path, config, 64)  # no folder of sentence-transformers
    (tmp_path / "modules.json").write_text('[{"type": "Transformer", "path": ""}]')
    if said:
        with pytest.raises(ConfigError, match=said[0].replace("(", r"\(")):
            input_types.check_same_as_folder(tmp_path, config, 64)
    else:
        input_types.check_same_as_folder(tmp_path, config, 64)


def test_flags_that_replace_a_runs_settings_are_named(tmp_path, monkeypatch, capsys):
    settings = drawn("text", 0) | {"data.pairs.query_instruction": "a "}
    workdir = started("text", settings, tmp_path, monkeypatch)
    args = ["embed", f"--checkpoint={workdir}", "--text=red", "--output=a.npy"]
    assert cli([*args, "--input_type=query", "--instruction=two "]) == 0
    assert "--instruction='two ' replaces the model's 'a '" in capsys.readouterr().out
    again = jaxvlm.load(workdir).encode_text(["two red"])
    np.testing.assert_allclose(np.load("a.npy"), again, atol=1e-6)
    args = ["mine", f"--checkpoint={workdir}", "--data=pairs.tsv", "--output=b.jsonl"]
    assert cli([*args, "--num_negatives=1", "--ignored_fields=other"]) == 2
    said = capsys.readouterr()
    assert "--ignored_fields=other replaces the run's data.ignored_fields note" in said.out
    assert "(note)" in said.err
    assert cli([*args, "--num_negatives=1", "--data_format=built_in"]) == 2  # no column_mapping
    assert "asked" in capsys.readouterr().err
