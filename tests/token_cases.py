"""What each kind of tower computes as visual tokens, in numbers that every machine agrees on.

Float32's last bits differ between processors, so towers are run in float64 here, on weights and
images from a generator of integers: what is left of a difference is far below what any change of
a formula makes.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import io
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from jaxvlm.cache.cached_step import make_encode_step
from jaxvlm.cache.encode import EncodeStep
from jaxvlm.cache.policy import make_policy
from jaxvlm.cache.token_order import ROW_MAJOR, TokenLayout, parse
from jaxvlm.config import (
    CacheConfig,
    ConnectorConfig,
    DecoderConfig,
    DualConfig,
    LoraConfig,
    MeshConfig,
    ModelConfig,
    RelevanceConfig,
    TextConfig,
    VisionConfig,
)
from jaxvlm.data.images.image_files import decode, squares
from jaxvlm.data.images.patches import Patching
from jaxvlm.models import vlm
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.spmd.model import build_model
from jaxvlm.types import Batch

SIZE, PATCH = 16, 4
BASE = VisionConfig(
    image_size=SIZE, patch_size=PATCH, width=16, depth=2, num_heads=2, mlp_dim=24, stem="linear",
    position="learned", activation="gelu", norm="layer", norm_eps=1e-6, position_resize="corners",
    pixel_mean=(0.48, 0.46, 0.41), pixel_std=(0.27, 0.26, 0.28),
)  # fmt: skip
ANY_SIZE = dataclasses.replace(BASE, packed=True, patch_layout="cthw", frames=2, merge_block=2)
DECODER = DecoderConfig(
    vocab_size=32, width=16, depth=1, num_heads=2, num_kv_heads=2, head_dim=8, mlp_dim=16
)
LORA = LoraConfig(rank=2, alpha=4.0, dora=True, base="int8", targets=("vision/*",))


class Case(NamedTuple):
    """A tower whose tokens are kept."""

    config: ModelConfig | DualConfig
    order: str = ""
    """``config.cache.token_order``."""
    whole: bool = False
    """Through all of the cache's choice of images and windows, not one encode batch by itself."""


def _model(base: VisionConfig = BASE, connector: Any = None, **settings: Any) -> ModelConfig:
    vision = dataclasses.replace(base, **settings)
    merged = ConnectorConfig(merge=vision.merge_block)
    return ModelConfig(vision=vision, connector=connector or merged, decoder=DECODER)


def _dual(base: VisionConfig = BASE, **settings: Any) -> DualConfig:
    text = TextConfig(vocab_size=32, width=16, depth=1, num_heads=2, mlp_dim=16)
    return DualConfig(vision=dataclasses.replace(base, **settings), text=text, embed_dim=8)


CASES = {
    "learned_positions": Case(_model()),
    "conv_stem": Case(
        _model(stem="conv", position="sincos2d", activation="gelu_tanh", layer_scale=0.5)
    ),
    "class_token_left_out": Case(
        _model(class_token=True, pre_norm=True, activation="quick_gelu", feature_layer=-2)
    ),
    "class_token_kept": Case(
        _model(
            class_token=True, keep_class_token=True, feature_layers=(-1, -3), qk_norm_all=True,
            final_norm=False,
        ),
        order="merge2x2",
    ),
    "frozen_blocks": Case(
        _model(depth=4, frozen_blocks=2, class_token=True, feature_layers=(-4, -1), post_norm=False)
    ),
    "windows_and_rotation": Case(
        _model(
            ANY_SIZE, position="none", rope_theta=1e4, window=8, full_layers=(1,), norm="rms",
            gated=True, activation="silu", post_norm=False,
        ),
        whole=True,
    ),
    "stretched_positions": Case(
        _model(ANY_SIZE, rope_theta=1e4, depth=3, feature_layers=(-1, -3, -2))
    ),
    "relevance": Case(_model(connector=ConnectorConfig(relevance=RelevanceConfig(budget=4)))),
    "adapters": Case(dataclasses.replace(_model(), lora=LORA)),
    "dual_class": Case(_dual(class_token=True, pool="class", pre_norm=True)),
    "dual_attention": Case(
        _dual(packed=True, patch_layout="hwc", position_resize="antialias", pool="attention")
    ),
}  # fmt: skip


def words(seed: str, count: int) -> np.ndarray:
    """u64[count]; NumPy promises these for ever, and no numbers that are made of them."""
    return np.random.PCG64(zlib.crc32(seed.encode())).random_raw(count)


def uniform(seed: str, shape: tuple[int, ...]) -> np.ndarray:
    """f64 in -1 .. 1, the same on every machine."""
    count = int(np.prod(shape, dtype=np.int64))
    return ((words(seed, count) >> np.uint64(11)) * 2.0**-52 - 1.0).reshape(shape)


def pixels(seed: str, shape: tuple[int, ...]) -> np.ndarray:
    """u8."""
    count = int(np.prod(shape, dtype=np.int64))
    return (words(seed, count) >> np.uint64(56)).astype(np.uint8).reshape(shape)


def weights(shapes: dict[str, jax.ShapeDtypeStruct], dtype: Any) -> dict[str, np.ndarray]:
    """A tower's parameters, large enough that all of them matter."""
    made = {}
    for path, x in shapes.items():
        tower, _, name = path.partition("/")  # what a tower is called changes no number
        if tower != "vision":
            continue
        if x.dtype == jnp.int8:
            made[path] = np.rint(127 * uniform(name, x.shape)).astype(np.int8)
        elif name.endswith("int8_scale"):
            made[path] = ((1 + 0.3 * uniform(name, x.shape)) / 256).astype(dtype)
        elif name.endswith(("scale", "scale1", "scale2", "magnitude")):
            made[path] = (1 + 0.3 * uniform(name, x.shape)).astype(dtype)
        else:
            made[path] = (0.5 * uniform(name, x.shape)).astype(dtype)
    return made


class Tower(NamedTuple):
    """A case, ready to run."""

    recompute: EncodeStep
    shapes: dict[str, jax.ShapeDtypeStruct]
    batch: Batch
    run: Callable[[Any, Batch], jax.Array]


def tower(case: Case) -> Tower:
    """The tower of a case as a run builds it, and images for it."""
    config = case.config
    model = build_model(config, make_mesh(MeshConfig(1, 1, 1), jax.devices()[:1]))
    cache = CacheConfig(policy="strict", encode_batch=2, token_order=case.order)
    room = (SIZE // PATCH) ** 2
    windows = (room // 2, room) if config.vision.packed and case.whole else (room,)
    recompute = make_encode_step(cache, model, windows, make_policy(cache))
    shapes = {path: x for path, x in model.shapes.items() if path.startswith("vision/")}
    run = recompute.encode
    if case.whole:

        def run(params: Any, batch: Batch) -> jax.Array:
            return recompute.features(params, None, batch, recompute.lookup(None, batch))

    return Tower(recompute, shapes, _batch(config.vision, case.whole), run)


def _batch(vision: VisionConfig, whole: bool) -> Batch:
    """Two images: one a row, or where it is ``whole`` three, two of them in one row."""
    none = Batch(None, None, None, None)
    if not vision.packed:
        return none._replace(pixels=pixels("image", (2, 1, SIZE, SIZE, 3)))
    cut = Patching(PATCH, vision.merge_block, vision.frames, vision.patch_layout)
    sizes = [(2, 4), (4, 2), (4, 4)] if whole else [(2, 4), (4, 2)]
    given = [pixels(f"{h} x {w}", (h * PATCH, w * PATCH, 3)) for h, w in sizes]
    images = [(cut.grid(x), cut.cut(x)) for x in given]
    rows = [images[:2], images[2:]] if whole else [[x] for x in images]
    room, most = (SIZE // PATCH) ** 2, max(map(len, rows))
    patches = np.zeros((len(rows), room, cut.patch_dim), np.uint8)
    grid = np.zeros((len(rows), most, 3), np.int32)
    for r, row in enumerate(rows):
        for i, (shape, _) in enumerate(row):
            grid[r, i] = shape
        joined = np.concatenate([x for _, x in row])
        patches[r, : len(joined)] = joined
    return none._replace(patches=patches, grid=grid, is_stored=np.zeros(grid.shape[:2], bool))


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """What the code calls float32 is float64 inside."""
    single = jnp.float32
    jnp.float32 = vlm.DTYPES["float32"] = jnp.float64
    try:
        with jax.enable_x64(True):
            yield
    finally:
        jnp.float32 = vlm.DTYPES["float32"] = single


def tokens_of(case: Case) -> dict[str, Any]:
    """The tokens of a case: their shape, and sixteen sums with all signs drawn, of all of them."""
    made = tower(case)
    with in_float64():
        params = weights(made.shapes, np.float64)
        traced = jax.jit(made.run).trace(params, made.batch)
        rounded = {str(e.primitive) for e in equations(traced.jaxpr) if _is_single(e)}
        assert not rounded, f"{rounded} compute in float32 here, in which machines differ"
        found = np.asarray(traced.lower().compile()(params, made.batch))
    assert found.dtype == np.float64
    flat = found.reshape(-1)
    signs = np.where(words("signs", 16 * flat.size) >> np.uint64(63), 1.0, -1.0)
    sums = signs.reshape(16, -1) @ flat / np.sqrt(flat.size)
    return {"shape": list(found.shape), "sums": [round(x, 12) for x in sums.tolist()]}


def _is_single(equation: Any) -> bool:
    """Whether it rounds to float32; constants of NumPy's may have been of it before."""
    single = any(getattr(v.aval, "dtype", None) == np.float32 for v in equation.outvars)
    return single and str(equation.primitive) != "broadcast_in_dim"


_ROUNDING = ("dot_general", "rsqrt", "exp", "sin", "cos")


def precision_of(case: Case) -> dict[str, list[str]]:
    """In which dtypes a tower in bfloat16 takes products, norms, softmax and rotations.

    Float64 can't show that: a norm that forgets to leave bfloat16 gives the same numbers there.
    """
    config = dataclasses.replace(case.config, dtype="bfloat16")
    made = tower(case._replace(config=config, whole=False))
    params = weights(made.shapes, np.float32)
    found: dict[str, set[str]] = {}
    for equation in equations(jax.make_jaxpr(made.run)(params, made.batch)):
        if (name := str(equation.primitive)) in _ROUNDING:
            found.setdefault(name, set()).add(str(equation.outvars[0].aval.dtype))
    return {name: sorted(dtypes) for name, dtypes in sorted(found.items())}


def equations(jaxpr: Any) -> Iterator[Any]:
    """Of a jaxpr and of all inside of it."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            if hasattr(value, "eqns"):
                yield from equations(value)


def kept_order(name: str) -> list[int]:
    """Where a class token and the 36 tokens of an image, made row by row, are kept."""
    kept = TokenLayout(parse(name), ROW_MAJOR, 6)
    return kept.to_cache(np.arange(37)[:, None])[:, 0].tolist()


def _drawn(width: int, height: int, channels: int) -> np.ndarray:
    """u8[H, W, C]: coarse blocks, fine stripes and slopes, from integers alone."""
    y, x, c = np.mgrid[:height, :width, :channels]
    return ((x // 5 * 67 + y // 4 * 91 + x * (c + 1) * 7 + x * y * (c + 2) + c * 50) % 256).astype(
        np.uint8
    )


def _png(image: Image.Image, **more: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG", **more)
    return file.getvalue()


def _files() -> dict[str, bytes]:
    """Image files: of three channels, transparent, with sixteen bits, of few colours, turned."""
    colours, clear = _drawn(21, 14, 3), _drawn(21, 14, 4)
    deep = _drawn(21, 14, 1)[..., 0].astype(np.uint16) * 257
    few = Image.fromarray(_drawn(21, 14, 1)[..., 0] // 64, "P")
    few.putpalette(_drawn(4, 1, 3).tobytes())
    turned = Image.Exif()
    turned[0x0112] = 6
    return {
        "colours": _png(Image.fromarray(colours)),
        "transparent": _png(Image.fromarray(clear)),
        "sixteen_bits": _png(Image.fromarray(deep)),
        "palette": _png(few, transparency=1),
        "turned": _png(Image.fromarray(colours), exif=turned),
    }


PREPARED = (
    *(("colours", how) for how in ("squash", "pad", "crop")),
    *(("transparent", "squash"), ("sixteen_bits", "pad"), ("palette", "squash"), ("turned", "pad")),
)
"""Files, and how they are made square."""


def pixels_of(file: str, resize: str) -> str:
    """base64 of u8[8, 8, 3]: an image as it is decoded and prepared."""
    made = decode(_files()[file], squares(8, resize), 10_000)
    assert made.shape == (8, 8, 3)
    return base64.b64encode(made.tobytes()).decode()


FINDERS: dict[str, Callable[[], Any]] = {
    **{f"tokens/{name}": (lambda case=case: tokens_of(case)) for name, case in CASES.items()},
    **{
        f"bfloat16/{name}": (lambda case=CASES[name]: precision_of(case))
        for name in ("class_token_left_out", "windows_and_rotation", "relevance")
    },
    **{
        f"order/{name}": (lambda name=name: kept_order(name))
        for name in ("morton", "merge2x2", "tiled(3)")
    },
    **{f"pixels/{f}, {how}": (lambda f=f, how=how: pixels_of(f, how)) for f, how in PREPARED},
}
"""All that the golden file holds, by name."""
