"""What a site's run says of itself when it joins a federation."""

from __future__ import annotations

import hashlib
import operator
import pathlib
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import jax
import numpy as np

from jaxvlm import __version__
from jaxvlm.cache.identity import TOKENS_VERSION
from jaxvlm.cache.policy import make_policy
from jaxvlm.checkpoint import digest
from jaxvlm.config import Config, uses_cache
from jaxvlm.config.merge import RECIPE_FIELDS
from jaxvlm.federate.handshake import LOSSLESS, Facts, comparable
from jaxvlm.federate.messages import digest_of
from jaxvlm.trainer.run import Run
from jaxvlm.types import TrainState

_OWN = {
    *RECIPE_FIELDS,
    *("attention", "dtype", "checkpoint", "vision_checkpoint", "text_checkpoint"),
    *("target", "options"),
}
"""Settings of a model that sites may differ in, or (``dtype``) that are named elsewhere."""
_GROUPS = ("outer", "federate", "loss", "pair_loss", "embedding", "optim.frozen_dtype")


def facts_of_run(run: Run, state: TrainState, site: str, start: dict[str, str]) -> Facts:
    """Collect a run's facts.

    Args:
        run: built.
        state: its first state, or the one that it resumes from.
        site: its name.
        start: digests of the trained parameters that it had at step 0, by submodel.
    """
    config = run.config
    cache = config.cache
    policy = make_policy(cache, config.seed) if uses_cache(cache) else None
    learns = run.training.learns
    common = {
        "settings": _settings(config),
        "parameters": {p: f"{x.dtype} {list(x.shape)}" for p, x in sorted(state.params.items())},
        "frozen": _frozen_digests(state),
        "start": start,
        "tokenizer": {"files": _tokenizer_digest(run.tokenizer)},
        "images": {"preparation": getattr(run.dataset.preparation, "fingerprint", "none")},
        "tokens": {
            "dtype": config.network.dtype,
            "codec": cache.codec if cache.store else LOSSLESS,
            "token_order": cache.token_order,
            "version": TOKENS_VERSION,
        },
    }
    return Facts(
        site=site,
        common=common,
        about={
            "platform": jax.default_backend(),
            "device": jax.devices()[0].device_kind,
            "jaxvlm": __version__,
            "jax": version("jax"),
        },
        token_bound=policy.max_staleness if policy and learns else 0,
        stacked={path: dims.lead for path, dims in run.model.adapted.items()},
    )


def host_params(params: Mapping[str, jax.Array]) -> dict[str, np.ndarray]:
    """Parameters in host memory, f32 by path."""
    return {path: np.asarray(x, np.float32) for path, x in jax.device_get(dict(params)).items()}


def _settings(config: Config) -> dict[str, Any]:
    """Settings that sites have in common, as JSON values by path."""
    network = "config.dual" if config.embedder == "dual" else "config.model"
    paths = {
        path: value
        for path, value in comparable(config.network, network).items()
        if not _OWN & set(path.split("."))
    }
    for group in _GROUPS:
        paths |= comparable(operator.attrgetter(group)(config), f"config.{group}")
    return dict(sorted(paths.items()))


def _frozen_digests(state: TrainState) -> dict[str, str]:
    """Digest of each submodel's frozen parameters, the same on every mesh."""
    paths = sorted(state.frozen)
    sums = dict(zip(paths, digest.digests([state.frozen[path] for path in paths])))
    groups = sorted({path.split("/")[0] for path in paths})
    of_group = {
        g: {p: np.asarray([sums[p]], np.uint32) for p in paths if p.split("/")[0] == g}
        for g in groups
    }
    return {group: digest_of(arrays) for group, arrays in of_group.items()}


def _tokenizer_digest(tokenizer: Any) -> str:
    """Digest of a tokenizer's files; "" where the run reads no texts."""
    if tokenizer is None:
        return ""
    sums = hashlib.blake2b(digest_size=16)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name) / "tokenizer"
        tokenizer.save(folder)
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                sums.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return sums.hexdigest()
