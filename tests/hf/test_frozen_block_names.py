"""Import into a vision encoder with frozen blocks, and export: same bits, same logits."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from numerics import close_in_norm

pytest.importorskip("torch", reason="the oracle; Python 3.11 only")
pytest.importorskip("transformers", reason="the oracle")

import qwen  # after the oracle is known to be there
import vlm_cases as vlm

from jaxvlm.config import feature_blocks
from jaxvlm.hf.families import FAMILIES, qwen_vl
from jaxvlm.models.frozen_blocks import recut
from jaxvlm.spmd.model import build_model


def case(name):
    """(model without frozen blocks, its parameters, its tensors, its family)."""
    of = qwen if name in qwen.PLAIN else vlm
    theirs, model, params = of.oracle(name)
    family = qwen_vl if of is qwen else FAMILIES[theirs.config.model_type]
    return model, params, family.weights(model.config).dump(params), family


def with_frozen_blocks(model, frozen):
    vision = dataclasses.replace(model.config.vision, frozen_blocks=frozen)
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
    for frozen in range(1, max(feature_blocks(whole.config.vision))):
        model = with_frozen_blocks(whole, frozen)
        names = family.weights(model.config)
        loaded = names.load(tensors)
        assert {p: x.shape for p, x in loaded.items()} == {
            p: x.shape for p, x in model.shapes.items()
        }
        for path, x in recut(params, frozen).items():
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
    return vlm.make_batch(name, *vlm.rows_of(name, "one image"))


@pytest.mark.parametrize(
    "name, frozen",
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
def test_logits_are_those_without_frozen_blocks(name, frozen):
    """Models with windows, position tables, feature layers on both sides, a class token."""
    whole, params, _, _ = case(name)
    batch = batch_of(name, whole)

    def logits(model, params):
        out = jax.jit(model.apply)(params, batch)
        return np.asarray(out.logits(out.hidden))

    expected = logits(whole, params)
    found = logits(with_frozen_blocks(whole, frozen), recut(params, frozen))
    close_in_norm(found, expected, 1e-5)
