"""Train steps are lowered for GPUs and TPUs that are not here."""

from __future__ import annotations

import json

import pytest
from zoo import LLAVA

from benchmarks import lowering
from benchmarks.common import RESULTS
from jaxvlm.config import MeshConfig, StrategyConfig, VisionConfig
from jaxvlm.hf import model_zoo
from jaxvlm.parallel.strategies import resolve
from jaxvlm.planner.memory.step_memory import StepSetup
from jaxvlm.planner.request import abstract_devices

CHIPS = {"h200": {1: "h200:1", 8: "h200:8"}, "v6e": {1: "v6e:1x1", 8: "v6e:2x4"}}
MESHES = {
    "one device": (MeshConfig(data=1), StrategyConfig()),
    "fsdp": (MeshConfig(data=1, fsdp=8), StrategyConfig("fsdp")),
    "tensor x pipeline": (MeshConfig(data=2, tensor=2, pipeline=2), StrategyConfig("ddp")),
    "ring": (MeshConfig(data=2, context=4), StrategyConfig("ddp", context="ring")),
    "ulysses": (MeshConfig(data=2, context=4), StrategyConfig("ddp", context="ulysses")),
}


def table():
    return json.loads((RESULTS / f"{lowering.NAME}.json").read_text())


def test_the_table_is_of_these_kernels_and_families():
    """Where this fails, run ``python -m benchmarks.lowering`` and commit its result."""
    assert table()["digest"] == lowering.digest()
    assert table()["models"] == lowering.digests(model_zoo.names())


def test_every_step_is_lowered_without_an_array_of_all_queries_and_keys():
    rows = {row["case"]: row for row in table()["rows"]}
    assert set(rows) == {", ".join(case) for case in lowering.cases()}
    for name, row in rows.items():
        assert "why" not in row and not row["squares"], name
        kernels = " ".join(row["kernels"])
        assert "pairs" in name or "flash_forward" in kernels, name
        assert "ScaleBias" not in kernels, name


def test_a_digest_is_of_code_alone():
    code = 'def f():\n    """Words."""\n    return 1\n'
    same = '"""More."""\n\n\ndef f():  # why\n    """Other words."""\n    return 1\n'
    assert lowering._without_docs(code) == lowering._without_docs(same)
    assert lowering._without_docs(code) != lowering._without_docs(code.replace("1", "2"))


def test_a_models_digest_is_of_what_it_sets():
    one, other = (lowering._set_fields(VisionConfig(depth=n)) for n in (7, 8))
    assert one == {"depth": 7} and other == {"depth": 8}
    found = lowering.digests(model_zoo.names())
    assert len(set(found.values())) == len(found)


def test_kernels_and_squares_are_read_from_a_program():
    text = (
        '%1 = stablehlo.custom_call @tpu_custom_call(%0) {kernel_name = "flash_forward"} : x\n'
        '%2 = stablehlo.custom_call @Sharding(%1) {name = "other"} : tensor<2x4096xf32>\n'
        "%3 = stablehlo.custom_call @__cudnn$fmhaSoftmax(%1) {api_version = 2} : "
        "tensor<2x16x4096x4096xbf16>\n"
    )
    assert lowering.kernels(text) == {"cudnn$fmhaSoftmax": 1, "flash_forward": 1}
    setup = StepSetup(LLAVA, MeshConfig(), None, "gpu", 1, 4096, 1)
    assert lowering.squares(text, setup) == ["2x16x4096x4096"]
    assert not lowering.squares(text, setup._replace(length=2048))


@pytest.mark.aot
@pytest.mark.parametrize("case", lowering.cover(), ids=", ".join)
def test_each_model_is_lowered(case):
    found = lowering.lower(case)
    rows = {row["case"]: row for row in table()["rows"]}
    assert "why" not in found, found
    assert found["squares"] == []
    assert found["kernels"] == rows[", ".join(case)]["kernels"]


@pytest.mark.aot
@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("chip", ["h200", "v6e"])
@pytest.mark.parametrize("model", ["llava-1.5-7b", "qwen3-vl-2b"])
def test_kernels_are_lowered_on_each_mesh(model, chip, name):
    """LLaVA's tower takes cuDNN's kernel on GPUs, Qwen's takes that of packed images."""
    count = 1 if name == "one device" else 8
    mesh, strategy = MESHES[name]
    layout = lowering.Layout(*resolve(strategy, mesh, abstract_devices.devices("cpu", count)))
    case = lowering.Case(CHIPS[chip][count], model, "full", "packed")
    found = lowering.lower(case, layout)
    assert "why" not in found, found
    names = " ".join(found["kernels"])
    assert ("cudnn" in names) == (model.startswith("llava") and chip == "h200")
    if strategy.context != "ring":
        assert "flash_backward" in names and not found["squares"]
