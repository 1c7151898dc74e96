"""``jaxvlm eval --classes``: zero-shot classification against transformers' CLIP; bad input."""

from __future__ import annotations

import json

import numpy as np
import pytest
from test_encoders import their_embeddings, write

from jaxvlm.cli.main import run as cli

torch = pytest.importorskip("torch", reason="the oracle; Python 3.11 only")
transformers = pytest.importorskip("transformers", reason="the oracle")
COLOURS = {"red": (200, 20, 20), "blue": (20, 20, 200), "big square": (90, 90, 90)}
TEMPLATES = ("a photo of {}", "{}")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    from PIL import Image

    folder = tmp_path_factory.mktemp("images")
    rows = []
    for i in range(12):
        name = list(COLOURS)[i % 3 if i < 8 else 0]
        noise = np.random.default_rng(i).integers(-20, 20, (16, 16, 3))
        pixels = np.clip(np.asarray(COLOURS[name]) + noise, 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
        rows.append(json.dumps({"image": f"{i}.png", "label": name}))
    (folder / "data.jsonl").write_text("\n".join(rows) + "\n")
    write(folder / "clip", "clip")
    return folder


@pytest.mark.long  # importing the oracle is slow
def test_accuracies_are_those_of_transformers(root, capsys):
    model = transformers.CLIPModel.from_pretrained(root / "clip").eval()
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(root / "clip")
    rows = [json.loads(line) for line in (root / "data.jsonl").read_text().splitlines()]
    _, seen, _ = their_embeddings(root / "clip", [str(root / row["image"]) for row in rows])
    prompts = [t.replace("{}", name) for name in COLOURS for t in TEMPLATES]
    with torch.no_grad():
        found = model.get_text_features(**tokenizer(prompts, padding=True, return_tensors="pt"))
    words = torch.nn.functional.normalize(getattr(found, "pooler_output", found)).numpy()
    classes = words.reshape(3, 2, -1).mean(axis=1)
    classes /= np.linalg.norm(classes, axis=1, keepdims=True)
    order = np.argsort(-seen @ classes.T, axis=1)
    wanted = np.asarray([list(COLOURS).index(row["label"]) for row in rows])
    expected = {k: (order[:, :k] == wanted[:, None]).any(axis=1).mean() for k in (1, 2)}
    (root / "names.txt").write_text("\n".join(COLOURS) + "\n")
    args = ["eval", f"--checkpoint={root / 'clip'}", f"--data={root / 'data.jsonl'}", "--json"]
    args += [f"--template={t}" for t in TEMPLATES] + ["--ks=1,2"]
    for classes in (",".join(COLOURS), str(root / "names.txt"), "labels"):
        assert cli([*args, f"--classes={classes}"]) == 0
        said = capsys.readouterr().out
        report = json.loads(said.splitlines()[-1])
        assert [report[f"top{k}"] for k in (1, 2)] == pytest.approx(list(expected.values()))
        assert report["majority/top1"] == pytest.approx(7 / 12) and report["classes"] == 3
        assert report["chance/top2"] == pytest.approx(2 / 3)
        assert "12 images, 3 classes" in said and "embedded as queries" not in said
    prompts = root / "clip" / "config_sentence_transformers.json"
    prompts.write_text(json.dumps({"prompts": {"query": "", "document": "this is "}}))
    assert cli([*args, "--classes=labels"]) == 0
    assert "prompts as documents, with the instruction 'this is '" in capsys.readouterr().out
    prompts.unlink()


def test_bad_input_is_one_line(root, tmp_path, capsys):
    def said(*args, data=root / "data.jsonl"):
        assert cli(["eval", f"--checkpoint={root / 'clip'}", f"--data={data}", *args]) == 2
        line = capsys.readouterr().err
        assert line.count("\n") == 1
        return line

    names = "--classes=red,blue,big square"
    assert "'big square', the label of an image, is not among" in said("--classes=red,blue")
    assert "give at least two names" in said("--classes=red")
    assert "'red' occurs twice" in said("--classes=red,red")
    assert "none.txt can't be read" in said(f"--classes={tmp_path / 'none.txt'}")
    assert "write {} exactly once" in said(names, "--template=a photo")
    assert "--template is for zero-shot" in said("--template={}")
    assert "with 3 classes the label is always among the first 3" in said(names, "--ks=1,3")
    assert "--literal_markers does not go with" in said(names, "--literal_markers=<img>")
    assert "--dims does not go with --classes" in said(names, "--dims=3")
    (tmp_path / "a.jsonl").write_text('{"image": "0.png"}\n')
    assert "no class: give its name as 'label'" in said(names, data=tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").write_text('{"label": "red"}\n')
    assert "no image: give its path as 'image'" in said(names, data=tmp_path / "b.jsonl")
    (tmp_path / "c.jsonl").write_text('{"image": "0.png", "label": "red", "text": "x"}\n')
    assert "a field of the record that jaxvlm does not read" in said(
        names, data=tmp_path / "c.jsonl"
    )
    assert "needs --data=FILE with records" in said(names, data="")
