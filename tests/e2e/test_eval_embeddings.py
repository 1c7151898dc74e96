"""``jaxvlm eval`` of embedding models: metrics of sentence-transformers, the grid, bad input."""

from __future__ import annotations

import json

import numpy as np
import pytest
from checkpoints import write_llava
from PIL import Image
from test_encoders import WORDS, write

import jaxvlm
from jaxvlm.cli.main import run as cli
from jaxvlm.data.pairs.examples import Example, Item
from jaxvlm.evals.retrieval import Retrieval
from jaxvlm.inference import retrieval
from jaxvlm.inference.embed_corpus import EmbedConfig
from jaxvlm.inference.prediction_grid import GridItem, RetrievedRow, draw_retrieval

pytest.importorskip("torch", reason="makes the weights; Python 3.11 only")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("encoder") / "bert", "bert")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Queries of two words; the two sentences with both, in either order, are relevant."""
    root = tmp_path_factory.mktemp("pairs")
    rows = []
    for i, a in enumerate(WORDS[:6]):
        b = WORDS[(i + 1) % 6]
        rows += [{"query": f"{a} {b}", "positive": f"{x} {y} photo"} for x, y in ((a, b), (b, a))]
    (root / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    texts = [json.dumps({"text": f"{word} of {word}"}) for word in WORDS]
    (root / "corpus.jsonl").write_text("\n".join(texts) + "\n")
    return root


@pytest.mark.long  # importing the oracle is slow
def test_metrics_are_sentence_transformers(folder, files, tmp_path, capsys):
    theirs = pytest.importorskip("sentence_transformers.evaluation", reason="the oracle")
    model = jaxvlm.load(folder)
    pairs = [json.loads(line) for line in (files / "pairs.jsonl").read_text().splitlines()]
    more = [json.loads(line)["text"] for line in (files / "corpus.jsonl").read_text().splitlines()]
    texts = list(dict.fromkeys([pair["positive"] for pair in pairs] + more))
    right = {}
    for pair in pairs:
        right.setdefault(pair["query"], set()).add(str(texts.index(pair["positive"])))
    given = [f"--data={files / 'pairs.jsonl'}", f"--corpus={files / 'corpus.jsonl'}", "--ks=1,3"]
    grid = tmp_path / "deep" / "predictions.png"
    args = [
        "eval",
        f"--checkpoint={folder}",
        *given,
        "--dims=6",
        f"--prediction_grid={grid}",
        "--json",
    ]
    args += ["--precisions=int8,binary"]
    assert cli(args) == 0
    said = capsys.readouterr().out
    report = json.loads(said.splitlines()[-1])
    for dims in (0, 6):
        evaluator = theirs.InformationRetrievalEvaluator(
            {query: query for query in right},
            {str(i): text for i, text in enumerate(texts)},
            right,
            precision_recall_at_k=(1, 3),
            ndcg_at_k=(3,),
            mrr_at_k=(3,),
            map_at_k=(3,),
            accuracy_at_k=(3,),
        )
        embeddings = [model.encode_text(some)[:, : dims or None] for some in (list(right), texts)]
        embeddings = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in embeddings]
        order = np.argsort(-embeddings[0] @ embeddings[1].T, axis=1, kind="stable")
        score = np.sort(-embeddings[0] @ embeddings[1].T, axis=1)
        hits = [
            [{"corpus_id": str(n), "score": -float(s)} for n, s in zip(row[:3], scores[:3])]
            for row, scores in zip(order, score)
        ]
        expected = evaluator.compute_metrics(hits)
        prefix = f"dims{dims}/" if dims else ""
        for name, called in (
            ("recall@1", "recall@k"),
            ("recall@3", "recall@k"),
            ("hit@3", "accuracy@k"),
            ("ndcg@3", "ndcg@k"),
            ("mrr@3", "mrr@k"),
            ("map@3", "map@k"),
        ):
            k = int(name[-1])
            assert report[prefix + name] == pytest.approx(expected[called][k], abs=1e-9), name
    assert report["queries"] == 6 and report["documents"] == len(texts)
    assert report["random/hit@1"] < 0.7 and "reverse/dims6/ndcg@3" in report
    assert "document to query" in said and "random" in said
    embeddings = [model.encode_text(some) for some in (list(right), texts)]
    embeddings = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in embeddings]
    signs = [np.where(x > 0, 1, -1) for x in embeddings]
    score = signs[0] @ signs[1].T
    best = [np.flatnonzero(row == row.max()) for row in score]  # few bits: many are tied
    hits = [np.mean([str(n) in right[q] for n in tied]) for tied, q in zip(best, right)]
    assert max(map(len, best)) > 1
    assert report["binary/hit@1"] == pytest.approx(np.mean(hits))
    assert "reverse/int8/ndcg@3" in report and "dims6/int8/hit@1" not in report
    with Image.open(grid) as drawn:
        assert drawn.size == (6 * 190 + 8, 6 * 212 + 8)


def test_bad_input_is_one_line(folder, files, tmp_path, capsys):
    given = ["eval", f"--checkpoint={folder}"]

    def said(*args):
        assert cli([*given, *args]) == 2
        line = capsys.readouterr().err
        assert line.count("\n") == 1
        return line

    pairs = f"--data={files / 'pairs.jsonl'}"
    assert "needs --data=FILE" in said()
    assert "needs --data=FILE" in said("--retrieval")
    assert "ks=13 is more than the 12 documents" in said(pairs, "--ks=1,13")
    assert "dims=25: the model's embeddings have 24" in said(pairs, "--dims=25")
    assert "'a' is not a whole number" in said(pairs, "--ks=a")
    assert "precisions: 'int4' is unknown; use float32, int8" in said(pairs, "--precisions=int4")
    assert "ks=(0,)" in said(pairs, "--ks=0")
    assert "x.txt: no such file" in said("--data=x.txt")
    (tmp_path / "one.jsonl").write_text('{"query": "a", "positive": "big"}\n')
    assert "the corpus has 1 documents" in said(f"--data={tmp_path / 'one.jsonl'}")


def test_a_grid_has_the_best_documents_and_the_rank_of_the_first_relevant_one(
    tmp_path, monkeypatch
):
    """40 documents in a circle, compared with a plain sort; one query has no relevant document."""
    angle = np.linspace(0, 2 * np.pi, 40, endpoint=False)
    documents = np.stack([np.cos(angle), np.sin(angle)], 1).astype(np.float32)
    queries = 3 * documents[[5, 20]]
    drawn = []
    monkeypatch.setattr(retrieval, "draw_retrieval", lambda rows, path: drawn.extend(rows))
    items = [Item(str(i)) for i in range(40)]
    right = [[8], []]
    given = ([Item("five"), Item("twenty")], queries), (items, documents)
    retrieval.retrieval_grid(*given, right, tmp_path / "s.png")
    five, twenty = sorted(drawn, key=lambda row: row.query.text)
    assert five.rank in (6, 7) and not any(five.right)  # 5, then 4 and 6, 3 and 7, 2 and 8
    assert {d.text for d in five.documents} == {"5", "4", "6", "3", "7"}
    assert five.scores[0] == pytest.approx(1) and five.scores[4] == pytest.approx(np.cos(angle[2]))
    assert twenty.rank == 0 and twenty.documents[0].text == "20"


def test_a_grid_marks_relevant_documents(tmp_path):
    Image.new("RGB", (30, 10), (0, 0, 250)).save(tmp_path / "p.png")
    texts = [GridItem("word " * 50), GridItem("", str(tmp_path / "p.png")), GridItem("c")]
    rows = [
        RetrievedRow(
            GridItem("q", str(tmp_path / "p.png")), texts, [0.9, 0.5, 0.1], [False, True, False]
        ),
        RetrievedRow(GridItem("r"), texts[:1], [0.2], [True]),
    ]
    draw_retrieval(rows, tmp_path / "deep" / "predictions.png")
    with Image.open(tmp_path / "deep" / "predictions.png") as grid:
        drawn = np.asarray(grid)
    assert drawn.shape == (2 * 212 + 8, 4 * 190 + 8, 3)
    frames = [tuple(drawn[6 + 212 * y, 60 + 190 * x].tolist()) for y in (0, 1) for x in range(4)]
    ink, green, red, white = (30, 30, 30), (0, 120, 60), (190, 30, 30), (255, 255, 255)
    assert frames == [ink, red, green, red, ink, green, white, white]
    assert (drawn[40, 60] == (0, 0, 250)).all() and (drawn[40, 60 + 380] == (0, 0, 250)).all()


@pytest.mark.long  # a decoder is compiled
def test_images_retrieve_texts_and_texts_images(data, tmp_path):
    """A decoder's embeddings; one example's positive is another's, by label."""
    folder = write_llava(tmp_path / "hf", data, "float32")
    model = jaxvlm.load(folder)
    for i in range(3):
        Image.new("RGB", (16, 16), (90 * i, 20, 20)).save(tmp_path / f"{i}.png")
    image = [Item("<image>which color", str(tmp_path / f"{i}.png")) for i in range(3)]
    words = [Item("it is red"), Item("yes"), Item("green")]
    pairs = zip(image, words)
    given = [Example(str(i), p, w, label="ab"[i // 2]) for i, (p, w) in enumerate(pairs)]
    how = EmbedConfig(8), EmbedConfig(8, instruction="which color")
    grid = str(tmp_path / "s.png")
    report = retrieval.evaluate(model, given, Retrieval((1, 3), (4,)), *how, prediction_grid=grid)
    assert report.metrics["recall@3"] == report.metrics["reverse/dims4/hit@3"] == 1
    queries = [model.embed([([q.image], q.text)])[0] for q in image]
    documents = [model.embed([([], d.text)], "which color")[0] for d in words]
    best = np.argmax(np.stack(queries) @ np.stack(documents).T, axis=1)
    right = [{0, 1}, {0, 1}, {2}]
    assert report.metrics["hit@1"] == np.mean([n in r for n, r in zip(best.tolist(), right)])
    with Image.open(grid) as drawn:
        assert drawn.size == (4 * 190 + 8, 3 * 212 + 8)
