"""Planned step times compared with compilers and schedules, and their invariants."""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import pathlib
import time

import jax
import numpy as np
import pytest
from builders import TINY

from benchmarks import collectives as compiled
from jaxvlm.config import (
    Config,
    ConfigError,
    DualConfig,
    LoraConfig,
    LossConfig,
    MeshConfig,
    ModelConfig,
    StrategyConfig,
    TextConfig,
    VisionConfig,
)
from jaxvlm.hf import model_zoo
from jaxvlm.models import model_flops as count
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.strategies import resolve
from jaxvlm.planner.hardware import calibrate, machine
from jaxvlm.planner.memory import step_memory
from jaxvlm.planner.request import abstract_devices, pairs
from jaxvlm.planner.time import communication, workload
from jaxvlm.planner.time.step_time import model_flops, step_time
from jaxvlm.spmd.model import build_model
from jaxvlm.train.gradcache import MiniBatch
from jaxvlm.types import Batch

RESULTS = pathlib.Path(__file__).parents[2] / "benchmarks" / "results"
SMALL = dataclasses.replace(
    compiled.MODEL,
    vision=dataclasses.replace(compiled.MODEL.vision, remat="none"),
    decoder=dataclasses.replace(compiled.MODEL.decoder, remat="none"),
)


EIGHT = MeshConfig(data=1, fsdp=8)


def planned(where="h200:8", preset="fsdp", sizes=EIGHT, config=SMALL, **more):
    there = machine.parse(where)
    devices = abstract_devices.devices(
        there.platform, there.devices, devices_per_host=there.devices_per_host
    )
    strategy = more.pop("strategy", StrategyConfig(preset))
    mesh, split = resolve(strategy, sizes, devices)
    fields = {"rows": there.devices, "length": 2048, "images": 2} | more
    return step_memory.StepSetup(config, mesh, split, there.platform, **fields), there


def timed(*args, **more):
    return step_time(*planned(*args, **more))


@pytest.fixture(autouse=True)
def nothing_measured(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


PACKED = VisionConfig(
    width=64, mlp_dim=256, packed=True, patch_layout="cthw", frames=2, rope_theta=1e4, gated=True
)
MODELS = {
    "experts": dataclasses.replace(
        SMALL, decoder=dataclasses.replace(SMALL.decoder, num_experts=8, experts_per_token=2)
    ),
    "frozen blocks": dataclasses.replace(
        SMALL, vision=dataclasses.replace(SMALL.vision, frozen_blocks=2, feature_layer=-2)
    ),
    "images and texts": DualConfig(text=TextConfig(vocab_size=300)),
    "texts": DualConfig(
        towers=("text",), project=(), text=TextConfig(vocab_size=300, pooler=True, num_types=2)
    ),
    "packed": ModelConfig(PACKED, decoder=dataclasses.replace(TINY.decoder, tied_embeddings=False)),
}


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_the_models(name):
    model = build_model(MODELS[name], make_mesh(MeshConfig(data=1), jax.devices()[:1]))
    found = workload.weights(MODELS[name])
    real = collections.Counter()
    for path, x in model.shapes.items():  # embeddings are left out
        tower = path.removeprefix("head/").split("/")[0]
        biases = path.endswith(("bq", "bk", "bv"))
        if len(x.shape) - ("/blocks/" in path) > 1 and not biases:
            real[tower] += math.prod(x.shape)
    for tower, size in real.items():
        assert found[tower].total == pytest.approx(size, rel=1e-3), tower
    assert sum(w.total for w in found.values()) == pytest.approx(real.total(), rel=1e-3)


def test_weights_of_published_models():
    rows = json.loads((RESULTS / "pods_aot.json").read_text())["rows"]
    counts = {r["model"]: r["parameters"] for r in rows if "adapters" not in r["trained"]}
    assert len(counts) == 3
    for name, size in counts.items():
        config = model_zoo.config_of(name)
        assert sum(w.total for w in workload.weights(config).values()) == pytest.approx(
            size, rel=2e-3
        )


# Compilers' own figures, made by benchmarks/collectives.py.
SENT = [
    r for r in json.loads((RESULTS / "collectives_aot.json").read_text())["rows"] if "sent" in r
]
SENT = {r["strategy"]: r for r in SENT if r["target"] == "h200:64"}


def sent_by_us(strategy):
    """(kind, axes) -> bytes per parameter that a device sends; and the compiler's row."""
    preset, sizes, *more = compiled.STRATEGIES[strategy]
    row = SENT[strategy]
    asked = StrategyConfig(preset, **(more[0] if more else {}))
    setup, _ = planned(
        "h200:64", strategy=asked, sizes=sizes, config=compiled.MODEL, rows=row["rows"],
        length=compiled.LENGTH, images=compiled.IMAGES,
        microbatches=8 if sizes.pipeline > 1 else 1,
    )  # fmt: skip
    sent = collections.Counter()
    for m in communication.messages(setup, 2):
        sent[m.kind, "x".join(m.axes)] += m.sent(setup.mesh) / row["parameters"]
    return sent, row


@pytest.mark.parametrize("strategy", [s for s in SENT if "1f1b" not in s and s not in (
    "interleaved", "gpipe")])  # fmt: skip
def test_bytes_sent_match_the_compilers(strategy):
    sent, row = sent_by_us(strategy)
    assert sent.total() == pytest.approx(row["sent_bytes_a_parameter"], rel=0.08)


@pytest.mark.parametrize("strategy", ["1f1b", "interleaved", "gpipe"])
def test_bytes_sent_by_pipelines_match_the_compilers(strategy):
    sent, row = sent_by_us(strategy)
    theirs = collections.Counter()
    for x in row["sent"]:
        theirs[x["kind"].removeprefix("collective-"), x["axes"]] += x["bytes_a_parameter"]
    for key in (("permute", "pipeline"), ("all-reduce", "data")):
        assert sent[key] == pytest.approx(theirs[key], rel=0.03), key
    # The reader of programs counts what is sent in a branch as often as there are ticks.
    assert sent["all-reduce", "pipeline"] < theirs["all-reduce", "pipeline"]


def test_hardware_flops_are_model_flops_plus_extra_work():
    config = dataclasses.replace(SMALL, attention="xla")
    setup, there = planned(config=config)
    found = step_time(setup, there)
    d, tokens = config.decoder, setup.rows * setup.length
    hidden = 3 * tokens * d.depth * 2 * setup.length * d.num_heads * d.head_dim  # causal half
    logits = 2 * tokens * d.width * d.vocab_size  # made again in the backward pass
    extra = found.hardware_flops - found.model_flops
    assert extra == pytest.approx(hidden + logits, rel=0.01)
    assert found.model_flops == pytest.approx(model_flops(setup))
    assert found.mfu / found.model_flops == pytest.approx(found.hfu / found.hardware_flops)


def test_model_flops_match_the_counting_convention():
    rows = json.loads((RESULTS / "pods_aot.json").read_text())["rows"]
    row = next(r for r in rows if r["model"] == "qwen3-vl-8b" and r["target"] == "h200:8")
    config = model_zoo.config_of(row["model"])
    for frozen in (("vision/*",), ()):
        setup, _ = planned(
            config=config, length=4096, images=4, patches=4096, frozen=frozen, rows=8
        )
        theirs = next(r for r in rows if r["frozen"] == bool(frozen) and r["model"] == row["model"])
        assert model_flops(setup) == pytest.approx(8 * theirs["flops_a_device"], rel=1e-6)


def test_remat_costs_time_but_no_model_flops():
    full = dataclasses.replace(
        SMALL,
        vision=dataclasses.replace(SMALL.vision, remat="full"),
        decoder=dataclasses.replace(SMALL.decoder, remat="full"),
    )
    none, again = timed(), timed(config=full)
    assert none.model_flops == again.model_flops and none.total < again.total
    assert 1.15 < again.hardware_flops / none.hardware_flops < 4 / 3


@pytest.mark.parametrize("where, least", [("h200:8", 1.2), ("v5p:2x2x2", 1.0)])
def test_activations_that_a_scan_stacks_take_time(where, least):
    """Of CLIP on one H200, a step without remat took 220 ms, of which 72 stacked activations."""
    config = model_zoo.config_of("clip-vit-b-32")

    def total(remat):
        both = {x: dataclasses.replace(getattr(config, x), remat=remat) for x in ("vision", "text")}
        setup, there = planned(
            where, config=dataclasses.replace(config, **both), rows=8192, length=77, images=1
        )
        return step_time(setup, there).total

    assert total("none") > least * total("dots") and total("full") > total("dots")


def test_frozen_parts_and_adapters_have_fewer_gradients():
    every, frozen = timed(), timed(frozen=("vision/*",))
    only = timed(frozen=("vision/*", "decoder/*"))
    lora = timed(config=dataclasses.replace(SMALL, lora=LoraConfig(rank=8)))
    assert frozen.parts["vision"] < 0.5 * every.parts["vision"]
    assert only.parts["update"] < frozen.parts["update"] < every.parts["update"]
    assert only.total < lora.total < every.total  # it goes back through the tower too


def test_more_devices_and_faster_links_take_no_longer():
    setup, there = planned()
    assert step_time(setup, there._replace(links=there.links / 100)).total > timed().total
    assert timed(rows=16).total > timed(rows=8).total
    many = timed("h200:64", sizes=MeshConfig(data=1, fsdp=64), rows=64)
    assert many.network > 0 == timed().network and many.tokens_per_s > 7 * timed().tokens_per_s
    assert timed("v5p:8").compute > timed("7x:8").compute


def test_a_ring_over_hosts_shares_their_network():
    whole, _ = planned("h200:64", sizes=MeshConfig(data=1, fsdp=64))
    across, there = planned("h200:64", "hybrid_shard", MeshConfig(data=8, fsdp=8))
    one = communication.Message("all-reduce", ("fsdp",), "decoder", 1e9, 1, False)
    links, network = communication.seconds(one, whole.mesh, there)
    assert links == pytest.approx(2 * 63 / 64 * 1e9 / (450e9 * there.shares.links))
    assert network == pytest.approx(2 * 63 / 64 * 1e9 / (8 * 50e9 * there.shares.network))
    assert communication.seconds(one, across.mesh, there)[1] == 0  # inside of hosts
    apart = one._replace(axes=("data",))  # eight rings at once, one a device of a host
    assert communication.seconds(apart, across.mesh, there) == (
        0, pytest.approx(2 * 7 / 8 * 1e9 / (50e9 * there.shares.network)),
    )  # fmt: skip


def test_all_reduces_overlap_unless_they_follow_a_reduce_scatter():
    sizes = MeshConfig(data=8, fsdp=8)
    whole = timed("h200:64", "ddp", MeshConfig(data=64), rows=512)
    setup, target = planned("h200:64", "hybrid_shard", sizes, rows=512)
    (sums,) = {m.hidden for m in communication.messages(setup, 2) if m.axes == ("data",)}
    assert not sums and whole.exposed < 0.1 * whole.network
    found = step_time(setup, target)
    assert found.exposed >= found.network  # nothing of the sums is hidden
    parts_of = timed("h200:64", "ddp", MeshConfig(data=64), rows=512, microbatches=2)
    assert parts_of.exposed > 0.9 * parts_of.network  # made when all microbatches are done


def test_measured_rates_of_a_gpu_count_thin_matmuls_bytes():
    setup, _ = planned(length=1, images=0)
    table = {name: {64: 1e15} for name in calibrate.PRODUCTS}
    scores = {name: {64: 1e15} for name in calibrate.SCORES}
    rates = calibrate.Rates(
        "NVIDIA H200", "0", {"bfloat16": table}, {"bfloat16": scores}, {4096: 1e12}, 1e12, 1e12, 1.0
    )
    found = step_time(setup, machine.parse("h200:8", "bfloat16", rates))
    read = sum(w.blocks for w in workload.weights(setup.config).values()) * 2 / 1e12
    assert found.parts["decoder"] > read / 2 and found.bound != "compute"


def test_bubbles_are_the_schedules():
    sizes = MeshConfig(data=2, pipeline=4)
    remat = dataclasses.replace(SMALL.decoder, remat="dots")
    config = dataclasses.replace(SMALL, decoder=remat)
    found = timed(sizes=sizes, preset="ddp", config=config, rows=32, microbatches=16)
    assert found.bubble / found.parts["decoder"] == pytest.approx(3 / 16)
    more = timed(sizes=sizes, preset="ddp", config=config, rows=32, microbatches=4)
    assert more.bubble / more.parts["decoder"] == pytest.approx(3 / 4)


def test_missing_figures_are_named():
    two = timed("rtx4090:16", sizes=MeshConfig(data=1, fsdp=16), rows=16)
    assert two.missing == ("RTX 4090: network",) and two.network == 0
    cpu = timed("cpu:8")
    assert cpu.total == cpu.mfu == cpu.tokens_per_s == 0 and "--calibrate" in cpu.missing[0]


def test_input_that_takes_longer_is_the_bound():
    setup, there = planned()
    found = step_time(setup, there, input_seconds=100.0)
    assert found.total == 100.0 and found.bound == "input"


def test_thousands_of_plans_take_seconds():
    setup, there = planned()
    start = time.process_time()
    for _ in range(50):
        step_time(setup, there)
    assert time.process_time() - start < 1.5  # with types checked; ten times faster without


def test_gradcache_costs_one_more_forward_pass():
    setup, there = planned(rows=32)
    rows = abstract_devices.BatchShape(setup.length, setup.images, setup.patches)
    made = pairs.PairShapes(
        rows, rows, pairs.embedding_settings(Config(loss=LossConfig(name="info_nce")))
    )
    whole = setup._replace(pairs=made)
    once = step_time(whole, there)
    mini_batches = (MiniBatch(1), MiniBatch(1))
    cut = whole._replace(pairs=made._replace(mini_batches=mini_batches), microbatches=made.parts(4))
    twice = step_time(cut, there)
    forward = step_time(setup._replace(frozen=("*",)), there)
    head = 2 * 32 * setup.length * SMALL.decoder.width * SMALL.decoder.vocab_size
    assert once.model_flops == pytest.approx(twice.model_flops)
    more = 2 * (forward.hardware_flops - head)  # of queries, and of documents
    assert twice.hardware_flops == pytest.approx(once.hardware_flops + more)
    assert twice.links > once.links > 0 and twice.total > once.total


def test_frozen_towers_run_once_with_gradcache():
    config = dataclasses.replace(DualConfig(), text=TextConfig(vocab_size=64))
    setup, there = planned(config=config, rows=64, length=24, images=1)
    run = Config(loss=LossConfig(name="info_nce"), embedder="dual")
    made = pairs.PairShapes(
        abstract_devices.BatchShape(0, 1),
        abstract_devices.BatchShape(24),
        pairs.embedding_settings(run),
    )
    one = setup._replace(pairs=made, frozen=("vision/*",))
    cut = one._replace(
        pairs=made._replace(mini_batches=(MiniBatch(2), MiniBatch(0))), microbatches=4
    )
    assert step_time(cut, there).hardware_flops == step_time(one, there).hardware_flops
    every = [x._replace(frozen=()) for x in (cut, one)]
    again, once = (step_time(x, there).hardware_flops for x in every)
    assert again > once


def test_unplannable_setups_are_refused():
    setup, there = planned()
    stages = setup._replace(config=DualConfig(), mesh=MeshConfig(data=2, pipeline=4))
    with pytest.raises(
        ConfigError, match=r"mesh\.pipeline=4.*pairs with pipeline parallelism can't be"
    ):
        step_time(stages, there)
    with pytest.raises(ConfigError, match="8 devices, but the planned h200 machine has 16"):
        step_time(setup, machine.parse("h200:16"))


def test_on_cpu_every_expert_processes_every_token():
    def flops(**more):
        decoder = dataclasses.replace(SMALL.decoder, num_experts=8, experts_per_token=2)
        setup, _ = planned(config=dataclasses.replace(SMALL, decoder=decoder), **more)
        return sum(op.flops for op in workload.work_items(setup, 4, False) if op.part == "decoder")

    d, tokens = SMALL.decoder, 2048
    mlp = 3 * tokens * 2 * 3 * d.width * d.mlp_dim * d.depth  # of one expert a token, a device
    assert flops(where="cpu:8") - flops() == pytest.approx((16 - 2) * mlp)


def test_dual_encoders_flops_match_the_count():
    config = dataclasses.replace(DualConfig(), text=TextConfig(vocab_size=64, causal=True))
    setup, there = planned(config=config, rows=64, length=24, images=1)
    ones = np.ones((64, 24), np.int32)
    batch = Batch(ones, ones, ones[:, None], ones, image_start=np.zeros((64, 1), np.int32))
    for frozen, trained in (((), ("vision/", "text/")), (("vision/*",), ("text/",))):
        theirs = count.encoders(config, batch, [path + "w" for path in trained])
        found = step_time(setup._replace(frozen=frozen), there)
        assert found.model_flops == pytest.approx(theirs.total)
        assert found.parts["vision"] and found.parts["text"] and found.total > 0
        assert found.hardware_flops > found.model_flops
    texts = dataclasses.replace(config, towers=("text",), project=())
    alone = step_time(setup._replace(config=texts, images=0), there)
    assert "vision" not in alone.parts and alone.images_per_s == 0


def test_bytes_sent_by_published_models_match_the_compilers():
    rows = json.loads((RESULTS / "pods_aot.json").read_text())["rows"]
    rows = [r for r in rows if "wire_bytes" in r and "h200" in r["target"]]
    rows = [r for r in rows if "adapters" not in r["trained"]]
    assert len(rows) == 10  # dense and with experts, 8 to 256 devices
    for row in rows:
        config = model_zoo.config_of(row["model"])
        towers = {
            t: dataclasses.replace(getattr(config, t), remat="full") for t in ("vision", "decoder")
        }
        setup, _ = planned(
            row["target"], row["strategy"], MeshConfig(**({"data": 1} | row["mesh"])),
            dataclasses.replace(config, **towers), length=4096, images=4, patches=4096,
            frozen=("vision/*",) if row["frozen"] else (),
        )  # fmt: skip
        sent = sum(m.sent(setup.mesh) for m in communication.messages(setup, 2))
        assert sent == pytest.approx(row["wire_bytes"], rel=0.07), (row["target"], row["model"])
