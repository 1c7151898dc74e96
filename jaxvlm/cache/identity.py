"""Identity of cached visual tokens: all facts that they depend on in addition to the image."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxvlm.cache.store import segment_files
from jaxvlm.checkpoint.digest import bit_words, flat_index, mix
from jaxvlm.checkpoint.run_record import has_checkpoint, write_whole
from jaxvlm.config import Config, ConfigError, DualConfig, json_text
from jaxvlm.data.images.image_files import Preparation
from jaxvlm.spmd.model import Model
from jaxvlm.spmd.submodels import feature_shape
from jaxvlm.types import Params, is_vision_path

IDENTITIES = ("all", "weights")
_SEEDS = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
TOKENS_VERSION = 1
"""Version of the computation of visual tokens; part of an identity, so rows of another version are
not read.

Raise it together with a change after which a vision encoder computes other tokens of the same
image, weights and settings: another formula, another block whose output is taken, another dtype of
a norm, another token order, another decoding or resizing of images. Leave it where tokens differ by
rounding alone. ``tests/cache/test_golden_tokens.py`` fails until it is raised, but that test runs
on the machine's own backend: it covers no kernel for other devices (GPUs, TPUs), and no JPEG files.
"""


def changed_settings(part: Any) -> dict[str, Any]:
    """Return the settings of a dataclass that are not at their default, by name.

    A setting that is added with a default, or renamed, leaves the identities of others unchanged.
    Whoever changes a default that tokens depend on raises ``TOKENS_VERSION``. Left out are
    ``remat``, which changes no token, and ``dropout``, since a frozen part has none.
    """
    found = {}
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if field.name in ("remat", "dropout") or value == field.default:
            continue
        found[field.name] = changed_settings(value) if dataclasses.is_dataclass(value) else value
    return found


def identity(
    config: Config,
    model: Model,
    preparation: Preparation,
    windows: Sequence[int],
    params: Params,
    encode_batch: int,
) -> dict[str, Any]:
    """Collect all facts that tokens depend on in addition to the image.

    Args:
        config: settings of the run.
        model: on its mesh.
        preparation: of images.
        windows: numbers of tokens that an image is padded to.
        params: of the model.
        encode_batch: images that the vision encoder takes at once on a data shard.

    Returns:
        JSON values; two runs with equal facts compute equal tokens of the same image.
    """
    network = config.network
    facts: dict[str, Any] = {
        "weights": weights_digest(params),
        "vision_encoder": changed_settings(network.vision),
        "width": feature_shape(network)[1],
        "pooled": isinstance(network, DualConfig),
        # Adapters above frozen blocks do not change the cached hidden states below.
        "adapters": {} if model.has_frozen_blocks else changed_settings(network.lora),
        "images": preparation.fingerprint,
        "libraries": {name: version(name) for name in ("pillow", "transformers")},
        "tokens_version": TOKENS_VERSION,
    }
    if config.cache.identity == "all":
        device = jax.devices()[0]
        facts |= {
            "platform": f"{device.device_kind} {device.client.platform_version}",
            "jax": f"{jax.__version__} {jax.lib.__version__}",
            "flags": [
                os.environ.get("XLA_FLAGS", ""),
                str(jax.config.values["jax_default_matmul_precision"]),
            ],
            "dtype": network.dtype,
            "attention": network.attention,
            "sharding": _sharding(model),
            "encode_batch": [*windows, encode_batch],
        }
    return facts


def weights_digest(params: Params) -> str:
    """Return a digest of the vision encoder's parameters that is the same on every mesh.

    Of floats it is that of their values in float32: tokens do not depend on the dtype in which a
    run holds them (``OptimConfig.frozen_dtype``).
    """
    paths = sorted(path for path in params if is_vision_path(path))
    floats = {path for path in paths if jnp.issubdtype(params[path].dtype, jnp.floating)}
    sums = _mixed(tuple(params[path] for path in paths))
    dtypes = {path: "float32" if path in floats else str(params[path].dtype) for path in paths}
    facts = [(path, dtypes[path], params[path].shape) for path in paths]
    return hashlib.blake2b(repr((facts, np.asarray(sums).tolist())).encode()).hexdigest()[:32]


@jax.jit
def _mixed(leaves: tuple[jax.Array, ...]) -> jax.Array:
    """Return u32[leaves, 4]: sums of words mixed with their positions. Mixing keeps changes in
    several words from cancelling, as they may in a sum of products; a sum does not depend on the
    order of its terms, so it is the same on every mesh.
    """
    lanes = []
    for leaf in leaves:
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        words = bit_words(leaf.astype(jnp.float32) if is_float else leaf)
        place = flat_index(words.shape)
        lane = [
            jnp.sum(mix(words ^ mix(place + jnp.uint32(seed))), dtype=jnp.uint32) for seed in _SEEDS
        ]
        lanes.append(jnp.stack(lane))
    return jnp.stack(lanes)


def _sharding(model: Model) -> dict[str, Any]:
    """Describe how the vision encoder is sharded. The number of data shards is left out, since it
    does not change how one image is computed.
    """
    mesh = {axis: size for axis, size in model.mesh.shape.items() if axis != "data"}
    return {"mesh": mesh, "strategy": changed_settings(model.strategies["vision"])}


def segments_at_start(
    workdir: pathlib.Path, folder: pathlib.Path, log: Callable[[str], None]
) -> set[str]:
    """Return the names of the segment files that ``folder`` held when the run in ``workdir`` began.

    A run does not read tokens that it wrote itself with a lossy codec, however often it is stopped
    and resumed: its losses would depend on when it was stopped. The names are recorded in the
    workdir when the run first opens the store.

    Args:
        workdir: of the run.
        folder: of the store's identity.
        log: takes a line for the log.

    Raises:
        ConfigError: the run's record of them can't be read.
    """
    path = workdir / "cache_segments.json"
    try:
        record = json_text.read(path) if path.is_file() else {}
        at_start = record.get(folder.name)
        at_start = at_start if at_start is None else set(map(str, at_start))
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"{path}: can't be read ({error}), so it is unknown which tokens in {folder} this run "
            "may read; remove it to read all of them, the run's own too, in which case its losses "
            "differ from those of an uninterrupted run"
        ) from None
    present = set[str]()
    try:
        present = {file.name for file in segment_files.list_folder(folder).segments}
    except FileNotFoundError:
        pass
    except OSError:
        return present  # the store warns why
    if at_start is None:
        at_start = present
        write_whole(path, json.dumps(record | {folder.name: sorted(present)}).encode())
        if present and has_checkpoint(workdir):
            log(
                f"{path} does not list the token files that {folder} held when this run began, so "
                "all are read; if this run wrote some of them, its losses differ from those of an "
                "uninterrupted run"
            )
    if missing := at_start - present:
        log(
            f"{folder}: {len(missing)} of {len(at_start)} token files that were there when this "
            "run began are missing, or were rewritten by `jaxvlm cache prune`; images that no "
            "other file holds are encoded, and losses differ from those of an uninterrupted run"
        )
    return at_start
