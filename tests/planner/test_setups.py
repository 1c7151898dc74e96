"""Published setups as data, and the verdicts on the planner's choices for them."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace

import pytest

from benchmarks import planner_choice, setups
from benchmarks.common import ROOT, kept
from jaxvlm.config import ConfigError
from jaxvlm.hf import model_zoo
from jaxvlm.hf.families.text_decoders import decoder_from_hf
from jaxvlm.parallel.strategies import PRESETS
from jaxvlm.planner.hardware import machine
from jaxvlm.planner.search.candidates import REMATS
from jaxvlm.planner.time import workload

ROWS = setups.load()
IDS = [row["id"] for row in ROWS]
KNOWN = {
    "id", "model", "text", "devices", "chip", "batch", "frozen", "lora", "loss", "checkpointing",
    "strategy", "theirs", "measured", "source", "unknown", "assumed",
}  # fmt: skip
BATCH = {"rows", "a_device", "length", "images", "patches"}
MEASURED = {"seconds", "tokens_per_s_a_device", "tflops_a_device"}


def test_there_are_twenty_and_each_once():
    assert len(set(IDS)) == len(IDS) >= 20


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_a_row_is_complete(row):
    assert not set(row) - KNOWN
    assert row["strategy"] and row["checkpointing"]
    assert ("model" in row) != ("text" in row)
    assert {"rows", "length"} <= set(row["batch"]) <= BATCH
    assert isinstance(row["unknown"], list)
    for one in row["source"]:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", one["repo"])
        assert re.fullmatch(r"[0-9a-f]{7,40}", one["commit"])
        assert one["path"] and one["says"]
    assert row["source"]
    assert (
        len(row.get("measured", {"seconds": 1})) == 1 and set(row.get("measured", {})) <= MEASURED
    )


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_models_chips_and_strategies_are_known(row):
    there = setups.machine_of(row)
    assert row["devices"].split(":")[0] in machine.names()
    assert there.chip.peak_flops and there.links
    if "model" in row:
        assert row["model"] in model_zoo.names()
    way = setups.theirs(row)
    assert there.devices == way.shards * way.mesh.tensor * way.mesh.context * way.mesh.pipeline
    assert there.devices == math.prod(row["theirs"]["mesh"].values())
    assert way.preset in PRESETS and way.remat in REMATS
    batch = row["batch"]
    assert batch["rows"] % way.shards == 0
    if "a_device" in batch:
        assert batch["rows"] == batch["a_device"] * way.shards * way.microbatches


@pytest.mark.parametrize("row", [r for r in ROWS if "text" in r], ids=lambda row: row["id"])
def test_dims_make_the_size_that_the_name_says(row):
    said = re.search(r"(\d+(?:\.\d+)?)b(?:-|$)", re.sub(r"llama\d(\.\d)?|qwen\d", "", row["id"]))
    asked = setups.question_of(row)
    found = workload.weights(asked.config.model)["decoder"].total / 1e9
    assert found == pytest.approx(float(said[1]), rel=0.08), found
    assert asked.rows == row["batch"]["rows"] and asked.length == row["batch"]["length"]
    assert decoder_from_hf(row["text"], "").width == row["text"]["hidden_size"]


def test_chips_of_other_memory():
    row = next(row for row in ROWS if "chip" in row)
    assert setups.machine_of(row).chip.hbm_bytes == row["chip"]["hbm_gib"] * 2**30


def test_layers_that_do_not_divide_are_reported():
    row = next(row for row in ROWS if row["id"] == "torchtitan-llama3.1-405b-512")
    with pytest.raises(ConfigError, match="126 layers by 8 stages"):
        setups.parts(setups.theirs(row), setups.question_of(row))


@pytest.mark.parametrize(
    ("rank", "theirs", "best", "said"),
    [
        (1, {"fits": True, "seconds": 1}, None, "first"),
        (2, {"fits": True, "seconds": 1}, None, "second"),
        (3, {"fits": True, "seconds": 3}, None, "faster"),
        (0, {"fits": True, "seconds": 1}, None, "slower"),
        (0, {"fits": False, "seconds": 1}, None, "theirs does not fit"),
        (0, {"fits": False, "seconds": 1}, {"seconds": 3}, "faster"),
        (0, {"why": "dims"}, None, "theirs can't be planned"),
        (0, {"why": "dims"}, {"seconds": 1}, "slower"),
    ],
)
def test_verdicts(rank, theirs, best, said):
    found = {"choices": [{"seconds": 2}], "rank": rank, "theirs": theirs, "theirs_best": best}
    assert planner_choice.verdict(found) == said
    assert planner_choice.verdict(found | {"choices": []}) == "nothing fits"


def test_collectives_overlap_or_do_not():
    row = next(row for row in ROWS if row["id"] == "torchtitan-llama3.1-8b-8")
    there, way = setups.machine_of(row), setups.theirs(row)
    rate = there.links * there.shares.links
    sent = [SimpleNamespace(axes=("fsdp",), wire_bytes=int(rate * 2))]
    least, most = planner_choice.roofline(3.0, sent, way, there)
    assert least == pytest.approx(3.0) and most == pytest.approx(5.0, rel=0.01)


def test_the_planner_chooses_as_the_authors():
    row = next(row for row in ROWS if row["id"] == "maxtext-llama2-7b-8")
    found = planner_choice.chosen(row)
    assert found["verdict"] in planner_choice.GOOD
    assert found["choices"][0]["fits"]
    assert found["measured_seconds"] == pytest.approx(1.427, rel=0.02)


def test_the_result_has_every_row_and_the_page_shows_it():
    rows = kept(planner_choice.NAME)
    assert [row["id"] for row in rows] == IDS
    page = (ROOT / "docs" / "planning_choice.md").read_text(encoding="utf-8")
    for line in planner_choice.table(rows):
        assert line in page
    for kind, count in planner_choice.summary(rows).items():
        assert f"{kind} {count}" in page
