"""A checkpoint's tensors in a tower with a trunk, and back: the same bits, the same logits."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

pytest.importorskip("torch", reason="the oracle; Python 3.11 only")
pytest.importorskip("transformers", reason="the oracle")

import qwen  # after the oracle is known to be there
import test_vlm_parity as vlm

from jaxvlm.build.model import build_model
from jaxvlm.build.trunk import recut
from jaxvlm.config import feature_blocks
from jaxvlm.models.families import FAMILIES, qwen_vl


def case(name):
    """(the whole tower's model, its parameters, its tensors, its family)."""
    of = qwen if name in qwen.PLAIN else vlm
    theirs, model, params = of.oracle(name)
    family = qwen_vl if of is qwen else FAMILIES[theirs.config.model_type]
    return model, params, family.weights(model.config).dump(params), family


def with_trunk(model, trunk):
    vision = dataclasses.replace(model.config.vision, trunk=trunk)
    return build_model(dataclasses.replace(model.config, vision=vision), model.mesh)


FAST = ("llava-mistral", "internvl", "qwen3-vl")


@pytest.mark.parametrize(
    "name",
    [
        *FAST,
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in (*vlm.CASES, *qwen.PLAIN)
            if name not in FAST
        ),
    ],
)
def test_tensors_go_round(name):
    whole, params, tensors, family = case(name)
    for trunk in range(1, max(feature_blocks(whole.config.vision))):
        model = with_trunk(whole, trunk)
        names = family.weights(model.config)
        loaded = names.load(tensors)
        assert {p: x.shape for p, x in loaded.items()} == {
            p: x.shape for p, x in model.shapes.items()
        }
        for path, x in recut(params, trunk).items():
            np.testing.assert_array_equal(loaded[path], x, err_msg=path)
        back = names.dump(loaded)
        assert back.keys() == tensors.keys()
        assert all(
            np.array_equal(x, back[n]) and x.dtype == back[n].dtype for n, x in tensors.items()
        )


def batch_of(name, model):
    if name in qwen.PLAIN:
        return qwen.make_batch(
            model, qwen.hf_config(name).to_dict(), *next(iter(qwen.ROWS.values()))
        )
    return vlm.make_batch(name, *vlm.rows_of(name, "one picture"))


@pytest.mark.parametrize(
    "name, trunk",
    [
        ("qwen2.5-vl", 1),
        ("qwen2.5-vl", 2),
        ("qwen3-vl", 1),
        ("qwen3-vl", 2),
        ("llava-mistral", 1),
        ("internvl", 1),
        ("gemma3", 1),
    ],
)
@pytest.mark.long
def test_logits_are_the_whole_towers(name, trunk):
    """Whose logits are torch's. Windows, tables, taps on both sides, a class token."""
    whole, params, _, _ = case(name)
    batch = batch_of(name, whole)

    def logits(model, params):
        out = jax.jit(model.apply)(params, batch)
        return np.asarray(out.logits(out.hidden))

    expected = logits(whole, params)
    found = logits(with_trunk(whole, trunk), recut(params, trunk))
    assert np.linalg.norm(found - expected) <= 1e-5 * np.linalg.norm(expected)
