"""Changes of parameters on the wire: nothing is lost in 32 bits, nothing for ever in fewer."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxvlm.config import GRAD_REDUCE_BITS
from jaxvlm.federate import codec, messages

FLOATS = hnp.arrays(
    np.float32, st.integers(1, 40), elements=st.floats(-(2.0**99), 2.0**99, width=32)
)


@settings(max_examples=200, deadline=None)
@given(st.data(), FLOATS)
def test_what_a_site_made_comes_back_to_the_bit(data, base):
    new = data.draw(
        hnp.arrays(np.float32, base.shape, elements=st.floats(-(2.0**99), 2.0**99, width=32))
    )
    # Neighbours of the base too, and what is as small as its rounding.
    near = np.nextafter(base, np.float32(np.inf))
    for became in (new, near, base * np.float32(1e-9), np.zeros_like(base)):
        parts, left = codec.encode({"a/w": became}, {"a/w": base}, "float32")
        change, rest = codec.decode("a/w", parts, base.shape, "float32")
        whole = base.astype(np.float64) + change + (0 if rest is None else rest)
        assert np.array_equal(whole.astype(np.float32), became)
        assert not left


@pytest.mark.parametrize("dtype, step", [("bfloat16", 2**-8), ("int8", 1 / 254), ("int4", 1 / 14)])
def test_rounding_is_bounded_and_fed_back(dtype, step):
    draws = np.random.default_rng(0)
    shape, error = (7, 75), None
    sent, true = np.zeros(shape), np.zeros(shape)
    base = draws.normal(size=shape).astype(np.float32)
    for _ in range(20):
        new = base + draws.normal(0, 0.1, shape).astype(np.float32)
        held = np.zeros(shape) if error is None else np.float64(error["w"])
        parts, error = codec.encode({"w": new}, {"w": base}, dtype, error)
        change, rest = codec.decode("w", parts, shape, dtype)
        assert rest is None
        wanted = np.float64(new - base) + held
        blocks = np.pad(np.abs(wanted).ravel(), (0, -wanted.size % 256)).reshape(-1, 256)
        bound = np.repeat(blocks.max(axis=1), 256)[: wanted.size].reshape(shape) * step
        if dtype == "bfloat16":
            bound = np.abs(wanted) * step
        assert (np.abs(change - wanted) <= bound * (1 + 1e-5) + 1e-12).all()
        sent, true = sent + change, true + np.float64(new - base)
    # What was sent and what is held are what was to be sent: a float32 rounding a turn is all.
    assert np.abs(sent + error["w"] - true).max() < 20 * 2**-24


def test_without_feedback_no_error_is_added():
    base, new = np.zeros(256, np.float32), np.full(256, 0.3, np.float32)
    new[0] = 100
    first, _ = codec.encode({"w": new}, {"w": base}, "int4")
    second, _ = codec.encode({"w": new}, {"w": base}, "int4", None)
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert codec.decode("w", first, (256,), "int4")[0][1] == 0  # lost, as it is below half a step


@pytest.mark.parametrize("dtype", GRAD_REDUCE_BITS)
def test_an_update_of_any_dtype_arrives_as_it_was_sent(dtype):
    base = np.random.default_rng(0).normal(size=(7, 75)).astype(np.float32)
    parts, _ = codec.encode(
        {"w": base * np.float32(1.1), "b": base[0]}, {"w": base, "b": base[1]}, dtype
    )
    sent = messages.Update("site-0", 1, 0, 10.0, 3, 0, 0.5, parts)
    message = messages.unpack(messages.pack_update(sent, "session"))
    got = messages.unpack_update(message)
    assert got.parts.keys() == parts.keys()
    for name, x in parts.items():
        assert got.parts[name].dtype == x.dtype and got.parts[name].tobytes() == x.tobytes()
    assert codec.decode("w", got.parts, base.shape, dtype)[0].shape == base.shape


@pytest.mark.parametrize(
    "dtype",
    [bool, np.float16, ml_dtypes.bfloat16, *(f"{k}{n}" for k in "iu" for n in (1, 2, 4, 8))],
)
def test_arrays_of_other_dtypes_do_too(dtype):
    arrays = {"x": np.arange(6).reshape(2, 3).astype(dtype), "none": np.zeros((0, 3), dtype)}
    arrays["number"] = np.asarray(1).astype(dtype)
    got = messages.load(messages.save(arrays))
    for name, x in arrays.items():
        assert (got[name].dtype, got[name].shape) == (x.dtype, x.shape)
        assert got[name].tobytes() == x.tobytes()


@pytest.mark.parametrize(
    "dtype, bits", [("float32", 32), ("bfloat16", 16), ("int8", 8), ("int4", 4)]
)
def test_bytes_on_the_wire(dtype, bits):
    base = np.random.default_rng(0).normal(size=(64, 1024)).astype(np.float32)
    new = base * np.float32(1.001)
    parts, _ = codec.encode({"w": new}, {"w": base}, dtype)
    size = sum(x.nbytes for x in parts.values()) * 8 / base.size
    assert bits <= size <= bits * 1.05
