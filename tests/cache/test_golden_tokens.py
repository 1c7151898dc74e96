"""What is computed as visual tokens does not change unless ``TOKENS_VERSION`` is raised with it.

A store on disk is found by that version, not by the code: a comment leaves it valid, and a change
that is not told would let runs read tokens that the code no longer makes.
"""

from __future__ import annotations

import base64
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from token_cases import FINDERS

from jaxvlm.cache import token_order
from jaxvlm.cache.identity import TOKENS_VERSION
from jaxvlm.config import derived
from jaxvlm.data.images import image_files
from jaxvlm.grid_order import permutation
from jaxvlm.models import vit, vlm
from jaxvlm.models.grid import AXES, rope2d
from jaxvlm.nn.mlp import ACTIVATIONS
from jaxvlm.nn.norm import LayerNorm

GOLDEN = pathlib.Path(__file__).parent.parent / "golden" / "tokens.json"
BOUND = 1e-9
"""Of sums of tokens that are of the size of 1, in float64: the same program for processors with
SSE4, AVX2 and AVX-512 agrees to 1e-12, and the least of the faults below makes 2e-6."""
LEVELS, MEAN_LEVELS = 1, 0.05
"""Of pixels in 0..255, each and in the mean: where a resize rounds."""
UPDATE = "`pytest tests/cache/test_golden_tokens.py --update-golden`"


def golden():
    return json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {"version": 0, "found": {}}


def differs(name, was, now):
    """Whether the values differ by more than rounding."""
    if name.startswith("tokens/"):
        if was["shape"] != now["shape"]:
            return True
        return not np.max(np.abs(np.subtract(was["sums"], now["sums"]))) <= BOUND  # NaNs too
    if name.startswith("pixels/"):
        before, after = (np.frombuffer(base64.b64decode(x), np.uint8) for x in (was, now))
        apart = np.abs(before.astype(int) - after)
        return apart.max() > LEVELS or apart.mean() > MEAN_LEVELS
    return was != now


def changed(was, now):
    return [x for x in was if x in now and differs(x, was[x], now[x])]


def verdict(held, found, version):
    """What is to be done, and "" where all is well.

    Args:
        held: the golden file.
        found: what is computed now.
        version: ``TOKENS_VERSION``.
    """
    other = changed(held["found"], found)
    if version < held["version"]:
        return (
            f"TOKENS_VERSION is {version}, but {GOLDEN.name} is of version {held['version']}: "
            "it is never lowered, since stores of the higher one may be out there."
        )
    if version > held["version"]:
        what = f"These differ: {', '.join(other)}." if other else "Nothing that it sees differs."
        return (
            f"TOKENS_VERSION is {version}, and {GOLDEN.name} is still of version "
            f"{held['version']}. {what} If that is what was meant, update the golden file: {UPDATE}"
        )
    if other:
        return (
            f"What is computed as visual tokens has changed: {', '.join(other)}. Stores on disk "
            "hold the tokens of before. If the change is meant, raise TOKENS_VERSION in "
            f"jaxvlm/cache/identity.py, so that they are not read, and then run {UPDATE}"
        )
    if odd := sorted(held["found"].keys() ^ found.keys()):
        return f"{GOLDEN.name} has other cases than the test: {', '.join(odd)}. Run {UPDATE}"
    return ""


def updated(held, found, version):
    """The golden file to be written; of one version no number is replaced."""
    kept = held["found"] if version == held["version"] else {}
    return {"version": version, "found": {name: kept.get(name, found[name]) for name in found}}


@pytest.fixture(scope="module")
def found():
    return {name: find() for name, find in FINDERS.items()}


def test_tokens_are_those_of_their_version(found, request):
    held = golden()
    if request.config.getoption("--update-golden"):
        forbidden = version_is_not_raised(held, found, TOKENS_VERSION)
        assert not forbidden, forbidden
        made = json.dumps(updated(held, found, TOKENS_VERSION), indent=1, sort_keys=True)
        GOLDEN.write_text(made + "\n")
        return
    said = verdict(held, found, TOKENS_VERSION)
    assert not said, said


def version_is_not_raised(held, found, version):
    """Why the golden file is not to be updated; "" where it may be."""
    if version > held["version"]:
        return ""
    if version == held["version"] and not changed(held["found"], found):
        return ""  # at most a case more or less
    return verdict(held, found, version)


def _eps(patch):
    real = LayerNorm.__init__
    patch.setattr(
        LayerNorm, "__init__", lambda self, init, width, eps: real(self, init, width, 10 * eps)
    )


def _gelu(patch):
    patch.setitem(ACTIVATIONS, "gelu", functools.partial(jax.nn.gelu, approximate=True))


def _block(patch):
    real = derived.feature_blocks
    for module in (derived, vit):
        patch.setattr(
            module, "feature_blocks", lambda config: tuple(max(0, n - 1) for n in real(config))
        )


def _interpolation(patch):
    patch.setitem(AXES, "corners", AXES["antialias"])


def _rotation(patch):
    patch.setattr(
        vit, "rope2d", lambda at, *more: rope2d(at._replace(row=at.column, column=at.row), *more)
    )


def _normalisation(patch):
    real = vit.normalised
    patch.setattr(vlm, "normalised", lambda x, config: real(x * jnp.float32(255 / 256), config))


def _order(patch):
    patch.setattr(
        token_order, "permutation", lambda _, *sides: permutation(token_order.MORTON, *sides)
    )


def _norm_in_bfloat16(patch):
    def call(self, x):
        y = x - jnp.mean(x, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.eps)
        return y * self.scale[...].astype(x.dtype) + self.bias[...].astype(x.dtype)

    patch.setattr(LayerNorm, "__call__", call)


def _resize(patch):
    patch.setattr(
        image_files, "_fit", lambda x, size, how: x.resize((size, size), Image.Resampling.BILINEAR)
    )


FAULTS = {
    "another epsilon": (_eps, "tokens/learned_positions"),
    "another gelu": (_gelu, "tokens/learned_positions"),
    "another block": (_block, "tokens/class_token_left_out"),
    "another interpolation": (_interpolation, "tokens/stretched_positions"),
    "rows and columns exchanged": (_rotation, "tokens/stretched_positions"),
    "another scale of pixels": (_normalisation, "tokens/class_token_kept"),
    "another order": (_order, "order/merge2x2"),
    "a norm that stays in bfloat16": (_norm_in_bfloat16, "bfloat16/class_token_left_out"),
    "another resize": (_resize, "pixels/colours, squash"),
    "another grey": (lambda patch: patch.setattr(image_files, "PAD", 127), "pixels/colours, pad"),
    "transparency ignored": (
        lambda patch: patch.setattr(image_files, "rgb", lambda image: image.convert("RGB")),
        "pixels/transparent, squash",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault, monkeypatch):
    plant, name = FAULTS[fault]
    plant(monkeypatch)
    held = golden()
    said = verdict(held, {**held["found"], name: FINDERS[name]()}, held["version"])
    assert name in said and "raise TOKENS_VERSION" in said


def test_what_a_developer_is_told():
    def tokens(x):
        return {"tokens/a": {"shape": [1], "sums": [x]}}

    held = {"version": 3, "found": tokens(0.5)}
    same, other = tokens(0.5 + 1e-12), tokens(0.5 + 1e-8)
    assert verdict(held, same, 3) == ""
    assert "raise TOKENS_VERSION" in verdict(held, other, 3)
    assert "raise TOKENS_VERSION" in verdict(held, tokens(float("nan")), 3)
    assert "still of version 3. Nothing that it sees differs" in verdict(held, same, 4)
    assert "These differ: tokens/a" in verdict(held, other, 4)
    assert "never lowered" in verdict(held, same, 2)
    assert "other cases" in verdict(held, {}, 3)


def test_the_golden_file_is_updated_with_the_version_alone():
    held = {"version": 3, "found": {"order/a": [0, 1]}}
    other, more = {"order/a": [1, 0]}, {"order/a": [0, 1], "order/b": [2]}
    assert "raise TOKENS_VERSION" in version_is_not_raised(held, other, 3)
    assert "never lowered" in version_is_not_raised(held, other, 2)
    assert version_is_not_raised(held, other, 4) == version_is_not_raised(held, more, 3) == ""
    assert updated(held, other, 4) == {"version": 4, "found": other}
    assert updated(held, more, 3) == {"version": 3, "found": more}


def test_the_golden_file_is_small():
    assert GOLDEN.stat().st_size < 50_000
