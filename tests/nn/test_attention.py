"""Kernels that need an accelerator, in interpret mode, against XLA; masks against a loop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvlm.config import ConfigError, MeshConfig
from jaxvlm.nn import attention_backends
from jaxvlm.nn.kernels import cudnn
from jaxvlm.nn.mask import Mask, of_segments
from jaxvlm.nn.stack import REMAT
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.rules import Axes

B, T, N, K, H = 2, 128, 4, 2, 64
MESHES = {
    "one device": (MeshConfig(data=1), 1),
    "data 2 x tensor 2": (MeshConfig(data=2, tensor=2), 4),
}


def axes(mesh="one device"):
    config, count = MESHES[mesh]
    return Axes(make_mesh(config, jax.devices()[:count]))


def arrays(num_kv_heads=K):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(B, T, N, H), (B, T, num_kv_heads, H), (B, T, num_kv_heads, H), (B, T, N, H)]
    return [jax.random.normal(k, s, jnp.float32) for k, s in zip(keys, shapes, strict=True)]


def segments():
    """Two packed segments and padding in sequence 0; one segment to the end in sequence 1."""
    ids = np.ones((B, T), np.int32)
    ids[0, 50:], ids[0, 110:] = 2, 0
    return jnp.asarray(ids)


def masks(causal, packed):
    index = jnp.arange(T, dtype=jnp.int32)[None] if causal else None
    ids = segments() if packed else None
    spans = of_segments(T, causal, ids)
    return Mask(q_index=index, k_index=index, q_segment=ids, k_segment=ids, spans=spans)


CASES = {
    "causal, packed": (True, True, "one device"),
    "causal": (True, False, "one device"),
    "both ways, packed": (False, True, "one device"),
    "both ways": (False, False, "one device"),
    "causal, packed, on a mesh": (True, True, "data 2 x tensor 2"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_kernels_give_xlas_output_and_gradients(platform, case):
    causal, packed, mesh = CASES[case]
    q, k, v, d_out = arrays()
    mask = masks(causal, packed)
    kernel = functools.partial(attention_backends.BACKENDS["flash"], interpret=platform)
    real = (segments() > 0)[:, :, None, None] if packed else True

    def run(attention, place):
        def objective(q, k, v, mask):
            out = jnp.where(real, attention(q, k, v, mask, place), 0)
            return jnp.sum(out * d_out), out

        return jax.jit(jax.value_and_grad(objective, (0, 1, 2), has_aux=True))(q, k, v, mask)

    (_, expected), expected_grads = run(attention_backends.BACKENDS["xla"], axes())
    (_, got), grads = run(kernel, axes(mesh))
    np.testing.assert_allclose(got, expected, atol=2e-5)
    for name, a, b in zip("qkv", grads, expected_grads, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("platform", ["tpu", "gpu", "cudnn"])
def test_remat_dots_saves_what_a_kernel_gives(platform):
    """The forward kernel is not run again for the backward pass, in a scan over layers."""
    x = jnp.ones((1, 128, 2, 64), jnp.bfloat16)
    place = axes()

    def body(x, _):
        if platform == "cudnn":
            out = cudnn.cudnn_attention(x, x, x, None, causal=False, factor=1.0)
        else:
            out = attention_backends.BACKENDS["flash"](x, x, x, Mask(), place, interpret=platform)
        # As in a block, a matmul's gradient reads the output.
        return jnp.einsum("btnh,hk->btnk", out, jnp.eye(64, dtype=x.dtype)), None

    def runs(remat):
        def objective(x):
            out = jax.lax.scan(REMAT[remat](body), x, None, length=3)[0]
            return jnp.sum(out.astype(jnp.float32))

        gradient = jax.grad(objective)
        if platform == "cudnn":
            return str(jax.make_jaxpr(gradient)(x)).count("dot_product_attention_fwd")
        # An interpreted kernel is loops over its blocks.
        return jax.jit(gradient).lower(x).compile().as_text().count(" while(")

    assert 0 < runs("none") == runs("dots") < runs("full")


def test_the_dense_mask_is_its_definition():
    rng = np.random.default_rng(0)
    T = 24
    segment = np.sort(rng.integers(0, 5, (2, T)), axis=1).astype(np.int32)
    parent = np.where(segment > 2, 1, 0).astype(np.int32)
    group = rng.integers(0, 3, (2, T)).astype(np.int32)
    index = np.arange(T, dtype=np.int32)[None]
    position = rng.integers(0, T, (2, T)).astype(np.int32)
    for parts in ("", "s", "sp", "sg", "spg", "g", "w", "spgw", "spg0"):
        mask = Mask(
            q_index=jnp.asarray(index),
            k_index=jnp.asarray(index),
            q_segment=jnp.asarray(segment) if "s" in parts else None,
            k_segment=jnp.asarray(segment) if "s" in parts else None,
            q_parent=jnp.asarray(parent) if "p" in parts else None,
            q_group=jnp.asarray(group) if "g" in parts else None,
            k_group=jnp.asarray(group) if "g" in parts else None,
            window=6 if "w" in parts else 0 if "0" in parts else None,
            q_position=jnp.asarray(position),
            k_position=jnp.asarray(position),
        )
        expected = np.zeros((2, T, T), bool)
        for b in range(2):
            for q in range(T):
                for k in range(T):
                    together = "g" in parts and group[b, q] > 0 and group[b, q] == group[b, k]
                    joined = "s" not in parts or segment[b, q] == segment[b, k]
                    if "p" in parts and parent[b, q] > 0:
                        joined |= parent[b, q] == segment[b, k]
                    near = "w" not in parts or position[b, q] - position[b, k] < 6
                    expected[b, q, k] = joined and (k <= q or together) and near
        got = np.broadcast_to(mask.dense(), expected.shape)
        np.testing.assert_array_equal(got, expected, err_msg=parts)
    assert Mask().dense() is None


@pytest.mark.parametrize(
    "scores", [attention_backends.Scores(), attention_backends.Scores(0.3, 2.0)]
)
def test_xla_is_a_softmax_over_allowed_keys(scores):
    q, k, v, _ = (np.asarray(x, np.float64) for x in arrays())
    ids = np.asarray(segments())
    out = attention_backends.attend(*arrays()[:3], masks(True, True), axes(), "xla", scores)
    for b, t, n in [(0, 0, 0), (0, 60, 3), (1, 127, 2), (0, 49, 1)]:
        keys = [s for s in range(t + 1) if ids[b, s] == ids[b, t]]
        score = np.asarray([q[b, t, n] @ k[b, s, n // (N // K)] for s in keys])
        score = score * (scores.scale or H**-0.5)
        if scores.cap:
            score = scores.cap * np.tanh(score / scores.cap)
        weight = np.exp(score - score.max())
        expected = (weight / weight.sum()) @ v[b, keys, n // (N // K)]
        np.testing.assert_allclose(out[b, t, n], expected, atol=1e-5)


def test_a_backend_that_cannot_serve_says_why():
    q, k, v, _ = arrays()
    mask = masks(True, True)

    def refuses(match, backend, q=q, k=k, v=v, mask=mask):
        with pytest.raises(ConfigError, match=match):
            attention_backends.attend(q, k, v, mask, axes(), backend)

    refuses("not known to be consecutive", "flash", mask=mask._replace(spans=None))
    refuses("not packed sequences", "cudnn")
    for backend in ("flash", "cudnn"):
        refuses("differ in length", backend, q=q[:, :1])
    with pytest.raises(ConfigError, match="no soft cap"):
        scores = attention_backends.Scores(cap=50.0)
        attention_backends.attend(q, k, v, mask, axes(), "cudnn", scores)
    whole = masks(True, False)
    refuses("not float32", "cudnn", mask=whole)
    half = [x.astype(jnp.bfloat16) for x in (q, k, v)]
    wide = [jnp.tile(x, (1, 1, 1, 3)) for x in half]
    refuses("up to 128, not 192", "cudnn", *wide, mask=whole)


def test_auto_passes_over_what_cannot_serve():
    q, k, _, _ = arrays()
    q, k = (jnp.tile(x, (1, 2, 1, 1)) for x in (q, k))
    parents = masks(True, True)._replace(q_parent=segments())
    assert attention_backends._choose(q, k, masks(True, True), "cpu", "auto") == "xla"
    assert attention_backends._choose(q, k, parents, "tpu", "auto") == "flash"
    assert attention_backends._choose(q, k, parents, "tpu", "auto", 50.0) == "flash"
    assert attention_backends._choose(q, k, Mask(), "tpu", "auto") == "flash"
    unknown = parents._replace(spans=None)
    assert attention_backends._choose(q, k, unknown, "tpu", "auto") == "xla"
    assert attention_backends._choose(q[:, :128], k[:, :128], Mask(), "tpu", "auto") == "xla"
    assert attention_backends._choose(q, k, masks(True, True), "gpu", "auto") == "xla"
    half, other = (x.astype(jnp.bfloat16) for x in (q, k))
    assert attention_backends._choose(half, other, parents, "gpu", "auto") == "flash"
    assert attention_backends._choose(half, other, Mask(), "gpu", "auto") == "cudnn"
    odd = (x[:, :177] for x in (half, other))
    assert attention_backends._choose(*odd, Mask(), "gpu", "auto") == "cudnn"
    assert attention_backends._choose(half, other, Mask(), "gpu", "auto", 50.0) == "flash"
    assert attention_backends._choose(half, other, unknown, "gpu", "auto") == "xla"
