"""Every strategy gives one device's loss, gradients and steps, and splits what its name says.

Here with one or two models each; the whole product is in benchmarks/results/strategy_matrix.json:
``JAXVLM_WHOLE_MATRIX=FILE.json pytest -m long tests/parallel/test_strategies.py -k equals`` runs
the whole product, an hour and more, and writes what it found; cases that the file has are left out.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import pathlib

import jax
import numpy as np
import optax
import pytest
import shown
from builders import recorded, worst_gradient
from numerics import close, close_in_norm
from zoo import KINDS, ROWS, on_stages

from jaxvlm.config import ConfigError, MeshConfig, StrategyConfig
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.sharding import to_global
from jaxvlm.parallel.strategies import PRESETS, resolve
from jaxvlm.spmd.model import build_model
from jaxvlm.spmd.train_step import assemble

STRATEGIES = {
    **{name: (name, MeshConfig()) for name in PRESETS if name not in ("single", "fsdp")},
    "hybrid_shard": ("hybrid_shard", MeshConfig(data=2)),
    "hpz": ("hpz", MeshConfig(data=2)),
    "tensor": ("ddp", MeshConfig(data=-1, tensor=4)),
    "zero1 x tensor": ("zero1", MeshConfig(data=2, fsdp=2, tensor=2)),
    "tensor beyond key heads": ("ddp", MeshConfig(1, tensor=8)),
    "fsdp x tensor": ("fsdp", MeshConfig(data=2, fsdp=2, tensor=2)),
    "context, gathered": ("ddp", MeshConfig(data=2, context=4)),
    "context, ring": ("ddp", MeshConfig(data=2, context=4), {"context": "ring"}),
    "context, ulysses": ("ddp", MeshConfig(data=2, context=4), {"context": "ulysses"}),
    "fsdp x context x tensor": (
        "fsdp",
        MeshConfig(1, fsdp=2, context=2, tensor=2),
        {"context": "ring"},
    ),
    "expert": ("fsdp", MeshConfig(1, fsdp=2, expert=4)),
    "expert x tensor": ("fsdp", MeshConfig(1, fsdp=2, expert=2, tensor=2)),
    "sequence": ("fsdp", MeshConfig(2, fsdp=2, tensor=2), {"sequence_parallel": True}),
    "vision replicated": ("fsdp", MeshConfig(), {"replicated": ("vision",)}),
    "gpipe": ("ddp", MeshConfig(pipeline=4), {"schedule": "gpipe"}),
    "1f1b": ("ddp", MeshConfig(pipeline=4)),
    "interleaved": (
        "ddp",
        MeshConfig(pipeline=2),
        {"schedule": "interleaved", "virtual_stages": 2},
    ),
    "stage x fsdp x tensor": ("fsdp", MeshConfig(1, fsdp=2, tensor=2, pipeline=2)),
    "stage x context": ("ddp", MeshConfig(1, context=2, pipeline=4), {"context": "ring"}),
    "moments on the host": ("zero1", MeshConfig(), {"offload": ("optimizer",)}),
    "sequence x context": (
        "ddp",
        MeshConfig(2, tensor=2, context=2),
        {"context": "ulysses", "sequence_parallel": True},
    ),
    "zero bubble": ("ddp", MeshConfig(pipeline=4), {"schedule": "zero_bubble"}),
    "zero bubble x fsdp x tensor": (
        "fsdp",
        MeshConfig(1, fsdp=2, tensor=2, pipeline=2),
        {"schedule": "zero_bubble"},
    ),
    "hpz, vision replicated": ("hpz", MeshConfig(data=2), {"replicated": ("vision",)}),
    "stage x fsdp, vision replicated": (
        "fsdp",
        MeshConfig(data=2, fsdp=2, pipeline=2),
        {"replicated": ("vision",)},
    ),
}


@functools.cache
def first_params(kind):
    here = make_mesh(MeshConfig(1, 1, 1), jax.devices()[:1])
    return jax.device_get(build_model(KINDS[kind].config, here).init(0))


@functools.cache
def trained(kind, strategy, frozen=False, packed=True, parts=1):
    """First loss and gradients, and the parameters after three steps."""
    config, loss, batch = KINDS[kind]
    preset, wanted, *more = STRATEGIES.get(strategy, ("single", MeshConfig()))
    asked = StrategyConfig(preset, **(more[0] if more else {}))
    mesh, split = resolve(asked, wanted, jax.devices())
    here = make_mesh(mesh, jax.devices()[:1] if preset == "single" else jax.devices())
    config = on_stages(config) if mesh.pipeline > 1 else config
    model = build_model(config, here, split)
    # A large epsilon: Adam makes rounding of gradients near zero as large as a step.
    tx = optax.chain(recorded(), optax.clip_by_global_norm(1.0), optax.adamw(1e-2, eps=1e-2))
    still = ("vision/*",) if frozen else ()
    step, _, init = assemble(model, loss, tx, parts, still)
    params = {p: jax.device_put(x, model.shardings[p]) for p, x in first_params(kind).items()}
    state, losses, first = init(params), [], None
    for seed in range(3):
        state, metrics = step(state, to_global(here, batch(seed, packed), ROWS))
        losses.append(float(metrics["loss"]))
        first = first or jax.device_get(state.opt_state[0])
    return losses, first, jax.device_get(state.params), state


def assert_equal_to_one_device(kind, strategy, frozen, packed, parts):
    losses, grads, params, state = trained(kind, strategy, frozen, packed, parts)
    expected, their_grads, their_params, _ = trained(kind, "one", frozen, packed)
    off = close(losses[0], expected[0], 1e-5)
    worst = worst_gradient(grads, their_grads, 1e-5)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    for path, x in their_params.items():
        close_in_norm(params[path], x, 1e-4, path, least=0.1)
    assert (set(state.frozen) == {p for p in state.frozen if p.startswith("vision/")}) and (
        bool(state.frozen) == frozen
    )
    return {"loss": off, "gradient": worst}


CHOICES = list(itertools.product((False, True), (True, False), (1, 2)))


def cover():
    """Every strategy with a decoder in turn, every third with a dual encoder too, experts' with
    both sides of each choice.

    What is frozen is unpacked and what is trained is packed, so that each model has two one-device
    runs to compare with and not four; the whole product has all.
    """
    decoders = [kind for kind in KINDS if kind != "dual"]
    for i, strategy in enumerate(STRATEGIES):
        kinds = [decoders[i % len(decoders)], *(["dual"] if i % 3 == 0 else [])]
        for n, kind in enumerate(["moe", "moe"] if "expert" in strategy else kinds):
            frozen = bool((i // len(decoders) + n) % 2)
            yield kind, strategy, frozen, not frozen, 1 + (i // 2 + n) % 2


COVER = list(cover())
LONG = pytest.mark.long
FAST = {("llava", "hpz, vision replicated")}
WHOLE = [(k, s, *c) for s in STRATEGIES for k in KINDS for c in CHOICES]
FOUND = os.environ.get("JAXVLM_WHOLE_MATRIX", "")


def parts_of(kind, strategy, parts):
    if STRATEGIES[strategy][1].pipeline > 1:
        return 4
    return 1 if kind == "dual" else parts  # its loss is no sum over examples


def refusal(kind, strategy):
    """Why a strategy cannot serve a model."""
    if "expert" in strategy and kind != "moe":
        return r"mesh\.expert=\d: this model has no experts"
    if STRATEGIES[strategy][1].pipeline > 1 and kind == "dual":
        return "splits a decoder's layers, and this model has"
    return ""


def matrix():
    cases = WHOLE if FOUND else COVER
    cases = [(k, s, f, p, parts_of(k, s, n)) for k, s, f, p, n in cases]
    cases = [(k, s, False, True, 1) if refusal(k, s) else (k, s, *c) for k, s, *c in cases]
    done = shown.matrix_of(pathlib.Path(FOUND)) if FOUND else {}
    return [case for case in dict.fromkeys(cases) if case not in done]


@pytest.mark.parametrize(
    ("kind", "strategy", "frozen", "packed", "parts"),
    [pytest.param(*case, marks=[] if case[:2] in FAST else [LONG]) for case in matrix()],
)
def test_it_equals_one_device(kind, strategy, frozen, packed, parts, record_property):
    case = (kind, strategy, frozen, packed, parts)
    if why := refusal(kind, strategy):
        with pytest.raises(ConfigError, match=why) as refused:
            trained(kind, strategy)
        record_property("matrix", (*case, {"refused": str(refused.value)}))
        return
    record_property("matrix", (*case, assert_equal_to_one_device(*case)))
    jax.clear_caches()  # a process can map only so many pieces of memory


def test_names_fill_in_mesh_and_split():
    devices = jax.devices()
    for name in PRESETS:
        asked = MeshConfig(data=2) if name in ("hybrid_shard", "hpz") else MeshConfig()
        mesh, split = resolve(StrategyConfig(name), asked, devices)
        assert resolve(split, mesh, devices) == (mesh, split)
        assert mesh.fsdp == {1: 8, 2: 4}[asked.data if asked.data > 0 else 1] or name in (
            "single",
            "ddp",
        )
    two = resolve(StrategyConfig("zero2"), MeshConfig(tensor=2), devices)[0]
    assert two == MeshConfig(data=1, fsdp=4, tensor=2)
    assert resolve(StrategyConfig("zero2"), MeshConfig(2, 4), devices)[0] == MeshConfig(2, 4)
    free = StrategyConfig(params=("data", "fsdp"), all_gathered=(), optimizer=("data", "fsdp"))
    assert resolve(free, MeshConfig(), devices)[1].params == ("fsdp", "data")


@pytest.mark.parametrize(
    ("strategy", "mesh", "message"),
    [
        ({"name": "zero4"}, {}, r"name='zero4'; known: single, ddp, zero1"),
        ({"name": "zero1", "params": ()}, {}, None),
        (
            {"name": "zero3", "params": ()},
            {},
            r"params=\(\) contradicts .*'zero3', whose value is \('fsdp',\)",
        ),
        ({"name": "ddp"}, {"fsdp": 2}, r"mesh\.fsdp=2: .*'ddp' shards nothing over fsdp"),
        ({"name": "single"}, {"data": 8}, "'single' takes one device"),
        ({"name": "hybrid_shard"}, {}, r"there is one host, so set config\.mesh\.data"),
        ({"name": "zero3"}, {"data": 8}, r"'zero3' shards over config\.mesh\.fsdp, .* size 1"),
        ({"name": "hpz"}, {"fsdp": 8}, r"'hpz' shards over config\.mesh\.data, .* so set config"),
        ({"context": "ring"}, {"data": 8, "context": -1}, r"not read with config\.mesh\.context=1"),
        ({"params": ("tensor",)}, {}, "'tensor' is none of fsdp, data"),
        ({"params": ("data", "data")}, {}, "names an axis twice"),
        ({"params": (), "all_gathered": ("fsdp",)}, {}, r"all_gathered=.* is split over 'fsdp'"),
        (
            {"optimizer": ()},
            {},
            r"params=.* is split over 'fsdp', which config\.strategy\.optimizer",
        ),
        (
            {"name": "zero3", "param_gather_dtype": "int8"},
            {},
            r"applies to the all-gather at the beg",
        ),
        (
            {"name": "fsdp_no_reshard", "param_gather_dtype": "int4"},
            {},
            "param_gather_dtype='int4'; kn",
        ),
        ({"sequence_parallel": True}, {}, r"is not read with config\.mesh\.tensor=1"),
        ({"offload": ("activations",)}, {}, r"names 'activations'; known: 'optimizer'. .*remat="),
        (
            {"schedule": "2f2b"},
            {"pipeline": 2},
            "schedule='2f2b'; known: 1f1b, interleaved, gpipe",
        ),
        ({"schedule": "gpipe"}, {}, r"is not read with config\.mesh\.pipeline=1"),
        (
            {"virtual_stages": 2},
            {"pipeline": 2},
            "virtual_stages=2 with schedule='1f1b': 'interleaved' takes 2 or",
        ),
        ({"schedule": "interleaved"}, {"pipeline": 2}, "virtual_stages=1 with schedule='inter"),
        ({"context": "rings"}, {"context": 2}, "known: gather, ring, ulysses"),
        ({"context": "ring"}, {}, r"is not read with config\.mesh\.context=1"),
    ],
)
def test_what_contradicts_is_refused(strategy, mesh, message):
    ask = functools.partial(resolve, StrategyConfig(**strategy), MeshConfig(**mesh), jax.devices())
    if message is None:
        ask()
        return
    with pytest.raises(ConfigError, match=message):
        ask()


def test_heads_that_ulysses_cannot_split_are_named():
    here = make_mesh(MeshConfig(data=1, context=8))
    config = KINDS["llava"].config
    odd = dataclasses.replace(config.decoder, num_heads=4, num_kv_heads=4)
    with pytest.raises(ConfigError, match=r"splits 4 heads over context x tensor = 8"):
        build_model(
            dataclasses.replace(config, decoder=odd), here, StrategyConfig(context="ulysses")
        )
