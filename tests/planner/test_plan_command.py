"""``jaxvlm plan`` as its users see it: tables, JSON, pages, comparisons, one-line errors."""

from __future__ import annotations

import gc
import html.parser
import json
import subprocess
import sys

import pytest
from runs import HERE, environment, write_data

from jaxvlm.cli.main import run
from jaxvlm.planner.report import page

RECIPE = str(HERE / "recipe.py")


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """(folder, document, what was printed) of the tests' recipe on four H100."""
    folder = tmp_path_factory.mktemp("plan")
    data = write_data(folder, images=8)
    argv = ["plan", f"--model={RECIPE}:{data}", "--devices=h100:4", "--json", "--top=2"]
    argv += ["--samples=800", "--price=2", f"--save={folder / 'a.json'}"]
    with pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setattr("builtins.print", lambda *args, **_: lines.extend(map(str, args)))
        assert run(argv) == 0
    text = "\n".join(lines)
    return folder, json.loads(text.splitlines()[-1]), text


def test_the_table_names_memory_time_and_price(planned):
    _, plan, text = planned
    for said in (
        "memory of a device, MiB",
        "time of a step",
        "tokens/s",
        "MFU",
        "why not the others",
    ):
        assert said in text
    best = plan["plans"][0]
    assert best["text"] in text and "--config.strategy.name=" in text
    memory = best["memory"]
    assert sum(memory["states"].values()) + sum(memory["work"].values()) == pytest.approx(
        memory["peak"], rel=1e-3
    )
    hours = 100 * best["time"]["total"] / 3600  # 800 rows in batches of 8
    assert best["epoch"] == {"hours": pytest.approx(hours), "cost": pytest.approx(8 * hours)}


def test_the_json_has_a_version_and_all_keys(planned):
    folder, plan, _ = planned
    assert plan["jaxvlm_plan"] == 1
    assert json.loads((folder / "a.json").read_text()) == plan
    golden = {
        *("jaxvlm_plan", "model", "machine", "batch", "loss", "frozen", "lora_rank", "samples"),
        *(
            "price",
            "plans",
            "nearest",
            "rejected",
            "compared",
            "notes",
            "tree",
            "scaling",
            "verified",
        ),
    }
    assert set(plan) == golden
    assert [branch["name"] for branch in plan["tree"]] == [
        "single", "DDP", "DDP, in microbatches", "FSDP + LoRA", "FSDP", "3-D",
    ]  # fmt: skip
    assert {branch["from"] for branch in plan["tree"] if "peak" in branch} == {"trace", "formula"}
    assert plan["plans"][0]["memory"]["from"] == "trace"
    assert plan["batch"] == {"rows": 8, "length": 64, "images": 2, "patches": 0}


class _Page(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.far, self.open = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in ("meta", "br"):
            self.open.append(tag)
        self.far += [v for k, v in attrs if k in ("src", "href", "data") and v]

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def _whole(text: str, figures: int) -> None:
    seen = _Page()
    seen.feed(text)
    assert not seen.open and not seen.far
    assert "script" not in seen.tags and "@import" not in text and "url(" not in text
    assert seen.tags.count("svg") == figures
    assert 'name="viewport"' in text and "prefers-color-scheme:dark" in text
    assert "@media print" in text


def test_the_page_is_complete_and_self_contained(planned):
    plan = planned[1]
    text = page.page(plan)
    _whole(text, 2)  # memory, time
    assert plan["plans"][0]["text"] in text and plan["rejected"][0]["family"] in text
    _whole(page.page(plan | {"plans": [], "nearest": plan["plans"][0]}), 1)


def test_the_page_has_the_rate_on_one_device_to_thousands(planned):
    folder, file = planned[0], planned[0] / "a.html"
    argv = ["plan", f"--model={RECIPE}:{folder / 'data.jsonl'}", "--devices=h100:4", "--top=1"]
    assert run([*argv, f"--html={file}", f"--save={folder / 'c.json'}"]) == 0
    _whole(file.read_text(), 3)
    plan = json.loads((folder / "c.json").read_text())
    assert [p["devices"] for p in plan["scaling"]] == [2**i for i in range(13)]
    fits = [p for p in plan["scaling"] if p["fits"]]
    rates = [p["tokens_per_s"] for p in fits]
    assert rates == sorted(rates) and fits[-1]["devices"] == 4096


def test_unknown_figures_are_none(planned, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(
        "jaxvlm.planner.hardware.machine._saved_rates", lambda kinds: None
    )  # as if not calibrated
    data = planned[0] / "data.jsonl"
    argv = ["plan", f"--model={RECIPE}:{data}", "--devices=cpu:2", "--top=1", "--samples=80"]
    assert run([*argv, "--json", f"--save={tmp_path / 'cpu.json'}"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    plan, text = json.loads(last), "\n".join(lines)
    best = plan["plans"][0]
    assert best["epoch"] == {"hours": None, "cost": None}
    assert (
        plan["machine"]["usable"] is plan["price"] is best["time"]["total"] is best["mfu"] is None
    )
    assert {branch["fits"] for branch in plan["tree"] if "peak" in branch} == {None}
    assert ": not known:" in text and ": yes:" not in text and "0%" not in text
    assert "0 tokens" not in text and "0.00" not in text
    assert "not known</b>" in page.page(plan)
    assert run(["plan", "--compare", *[f"{tmp_path}/cpu.json"] * 2]) == 0


def test_two_plans_are_compared(planned, capsys):
    folder, plan, _ = planned
    other = json.loads(json.dumps(plan))
    other["plans"][0]["time"]["total"] *= 2
    (folder / "b.json").write_text(json.dumps(other))
    files = [str(folder / "a.json"), str(folder / "b.json")]
    assert run(["plan", "--compare", *files, "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert json.loads(lines[-1])["ratios"]["step"] == pytest.approx(2)
    assert any(line.startswith("step") and "2.00" in line for line in lines)


@pytest.mark.parametrize(
    "argv, says",
    [
        (["--devices=h200:8"], "plan needs --model="),
        (["--model=qwen3-vl-2b"], "plan needs --devices"),
        (["--model=qwen3-vl-2b", "--devices=h20:8"], "h200"),
        (["--model=qwen3-vl-2b", "--devices=v5p:3x3x3"], "nearest: "),
        (["--model=qwen3-vl-2b", "--devices=h200:0"], "zero devices"),
        (
            ["--model=qwen9", "--devices=h200:8"],
            "nor a known published model: llava",
        ),
        (["--model=FOLDER", "--devices=h200:8"], "config.json is missing"),
        (["--model=nope.py", "--devices=h200:8"], "no such recipe"),
        (["--model=qwen3-vl-2b", "--devices=h200:8", "--batch=-1"], "--batch=-1"),
        (["--model=qwen3-vl-2b", "--devices=h200:8", "--train=some"], "full, lora, connector"),
        (["--model=qwen3-vl-2b", "--devices=h200:8", "--top=0"], "--top=0"),
        (["--model=clip-vit-b-32", "--devices=h200:8", "--objective=sft"], "predicts no tokens"),
        (["--model=clip-vit-b-32", "--devices=h200:8", "--train=connector"], "full or lora"),
        (["--model=clip-vit-b-32", "--devices=h200:8", "--seq=99"], "at most 77 tokens"),
        (["--model=clip-vit-b-32", "--devices=h200:8", "--images=2"], "has one image"),
        (["--model=qwen3-vl-2b", "--devices=h200:8", "--images=-5"], "--images=-5"),
        (["--model=qwen3-vl-2b", "--devices=h200:8", "--price=nan"], "--price=nan"),
        (["--model=qwen3-vl-2b", "--devices=h200:8", "--price=inf"], "--price=inf"),
        (["--model=qwen3-vl-2b", "--devices=h100:80000000"], "at most 65,536"),
        (
            ["--model=RECIPE", "--devices=h200:8", "--config.encoder.devices=2"],
            "a disaggregated vision encoder (config.encoder.devices=2) can't be planned yet",
        ),
        (["--model=llava-1.5-7b", "--devices=h200:8", "--images=9"], "have room for 3"),
        (["--model", "nope.py:x", "--devices", "h200:8"], "no such recipe: "),
        (["--model", "RECIPE", "--devices=h200:8", "--images=-5"], "--images=-5"),
        (["--model=siglip-so400m", "--devices=h200:8"], "siglip"),
        (["--compare", "a.json"], "takes two files"),
        (["--model=qwen3-vl-2b", "--devices=any", "--batch=8"], "needs --prices=FILE"),
        (["--model=qwen3-vl-2b", "--devices=any", "--prices=x"], "needs --batch"),
        (["--model=qwen3-vl-2b", "--devices=any", "--batch=8", "--prices=x"], "no such file"),
        (["--model=qwen3-vl-2b", "--devices=h200:8", "--budget=3"], "need --devices=any"),
        (["--compare", "a.json", "b.json"], "no such file"),
        (["--save=FOLDER/none/x.json", "--model=RECIPE", "--devices=h100:4"], "--save="),
    ],
)
def test_bad_input_is_one_line(argv, says, tmp_path, capsys, planned):
    data = planned[0] / "data.jsonl"
    argv = [a.replace("FOLDER", str(tmp_path)).replace("RECIPE", f"{RECIPE}:{data}") for a in argv]
    assert run(["plan", *argv]) == 2
    err = capsys.readouterr().err.strip()
    assert len(err.splitlines()) == 1 and says in err, err
    assert gc.isenabled()  # a plan is made without it


def test_a_batch_that_no_mesh_divides_is_reported(capsys, planned):
    data = planned[0] / "data.jsonl"
    argv = ["plan", f"--model={RECIPE}:{data}", "--devices=h200:64", "--batch=7", "--json"]
    assert run(argv) == 0
    plan = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert any("a batch of 7 is not divisible by 64" in one["text"] for one in plan["rejected"])


@pytest.mark.long
def test_verify_compiles_the_best_candidate(planned, capsys):
    recipe = f"--model={RECIPE}:{planned[0] / 'data.jsonl'}"
    assert run(["plan", recipe, "--devices=cpu:8", "--verify", "--top=1", "--json"]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    (row,) = json.loads(last)["verified"]
    assert row["text"] == json.loads(last)["plans"][0]["text"]
    # Of a device's row in a microbatch (64 tokens, 4,096 entries of 4 bytes): the CPU's compiler
    # writes the logits' exponentials and the argmax's indices out; those of chips fuse them.
    peak = row["compiled"]["peak"] - 2 * 64 * 4096 * 4
    assert row["predicted"] == pytest.approx(peak, rel=0.25)
    assert row["collectives"]


def test_what_can_not_be_compiled_is_a_one_line_error(planned, capsys, monkeypatch):
    recipe = f"--model={RECIPE}:{planned[0] / 'data.jsonl'}"
    monkeypatch.setitem(sys.modules, "libtpu", None)
    monkeypatch.setenv("XLA_FLAGS", "")
    assert run(["plan", recipe, "--devices=v5e:2x2", "--verify"]) == 2
    assert "pip install 'jaxvlm[aot]'" in capsys.readouterr().err
    assert run(["plan", recipe, "--devices=rtx6000ada:8", "--verify"]) == 2
    assert "rtx4090 and TPUs" in capsys.readouterr().err


def test_where_to_run_names_the_smallest_and_the_cheapest(tmp_path, capsys, planned):
    recipe, prices = f"--model={RECIPE}:{planned[0] / 'data.jsonl'}", tmp_path / "prices.json"
    prices.write_text('{"h200": 4, "v5e": 1}')
    argv = ["plan", recipe, "--devices=any", f"--prices={prices}", "--budget=8", "--json"]
    assert run(argv) == 0
    *text, last = capsys.readouterr().out.splitlines()
    rows = json.loads(last)["places"]
    assert {row["machine"] for row in rows} == {"h200", "v5e"}
    assert all(row["an_hour"] <= 8 for row in rows)
    costs = [row["per_million_tokens"] for row in rows]
    assert costs == sorted(costs) and costs[0] > 0
    assert costs[0] == pytest.approx(rows[0]["an_hour"] / 3600 / rows[0]["tokens_per_s"] * 1e6)
    assert [row["devices"] for row in rows if row["smallest"]] == [1, 1]
    assert any("smallest that fits" in line for line in text)
    prices.write_text('{"h20": 4}')
    assert run(argv) == 2 and "h200" in capsys.readouterr().err
    prices.write_text('{"h200": "dear"}')
    assert run(argv) == 2 and "h200='dear'" in capsys.readouterr().err


PROGRAM = """
import sys
from jaxvlm.cli.main import run
code = run(["plan", "--model=qwen3-vl-235b-a22b", "--devices=h200:4096", "--batch=4096",
            "--seq=4096", "--json"])
heavy = {"torch", "transformers", "orbax", "grain", "tensorstore", "libtpu"} & set(sys.modules)
import jax._src.xla_bridge as bridge
print(code, sorted(heavy), sorted(bridge._backends))
"""


@pytest.mark.long
def test_a_large_model_on_a_large_pod_is_planned_without_any_accelerator_library():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        env=environment() | {"JAX_PLATFORMS": ""},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    *_, plan, last = done.stdout.splitlines()
    assert last == "0 [] []"  # nor any device of JAX's asked for
    best = json.loads(plan)["plans"][0]
    assert best["memory"]["peak"] < 0.92 * 141 * 2**30 and best["mesh"]["expert"] > 1
