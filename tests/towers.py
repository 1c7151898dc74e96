"""Vision encoders and connectors of transformers' torch models, and ours with their weights."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from builders import worst_gradient
from flax import nnx
from numerics import close_in_norm

from jaxvlm.config import MeshConfig
from jaxvlm.hf.families.name_map import NameMap
from jaxvlm.models.connector import Connector
from jaxvlm.models.vit import ViT
from jaxvlm.nn.param import Init, merge, split
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.rules import Axes


class Towers(nnx.Module):
    """Tower and connector as :class:`jaxvlm.models.vlm.VLM` runs them."""

    def __init__(self, init, axes, vision, connector, width):
        self.vision = ViT(init, axes, vision, "auto")
        taps = max(1, len(vision.feature_layers))
        self.connector = (
            None
            if connector is None
            else Connector(init, axes, connector, taps * vision.width, width)
        )

    def __call__(self, x, grid):
        """[levels + 1, B, tokens, D]."""
        if self.connector is None and self.vision.config.pool != "none":
            return self.vision.pooled(x, grid)[None]
        x, blocks = self.vision(x, grid), grid is not None
        if self.connector is None:
            return x[None]
        first = self.connector(x, blocks)[None]
        if self.connector.levels is None:
            return first
        return jnp.concatenate([first, self.connector.deep(x, blocks)])


class Case(NamedTuple):
    """One configuration: their model and ours."""

    torch_model: torch.nn.Module
    torch_run: object
    """torch_model -> [levels + 1, tokens, D]."""
    vision: object
    connector: object
    width: int
    weights: NameMap
    x: np.ndarray
    grid: np.ndarray | None = None
    merge: int = 1


def shaken(model):
    """``model`` in eval mode, its biases and norms moved from 0 and 1, which hide mistakes."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.2 if parameter.ndim < 2 else max(0.0, 0.2 - float(parameter.std()))
            parameter += scale * torch.randn_like(parameter)
    return model.float().eval()


def packed(grids, length, patch_dim):
    """Packed patches with padding at the end, their grids, and the same for torch."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=(len(grids), length, patch_dim)).astype(np.float32)
    grid = np.zeros((len(grids), max(map(len, grids)) + 1, 3), np.int32)
    rows = []
    for b, row in enumerate(grids):
        grid[b, : len(row)] = row
        used = int(grid[b].prod(-1).sum())
        rows.append(x[b, :used])
        assert used < length
    flat = torch.from_numpy(np.concatenate(rows))
    return x, grid, flat, torch.tensor([g for row in grids for g in row])


def compare(case):
    """Outputs, gradients and names of ``case`` against torch's; relative errors."""
    chosen = {
        name: p
        for name, p in case.torch_model.named_parameters()
        if not name.startswith(("language_model", "text_model"))  # the decoder
    }
    params = case.weights.load({n: p.detach().numpy() for n, p in chosen.items()})
    axes = Axes(make_mesh(MeshConfig(data=1), jax.devices()[:1]))
    seen = {}

    def draw(key):
        module = Towers(Init(nnx.Rngs(params=key)), axes, case.vision, case.connector, case.width)
        seen["graph"], flat = split(module)
        return flat

    shapes = jax.eval_shape(draw, jax.random.key(0))
    assert {n: x.shape for n, x in shapes.items()} == {n: x.shape for n, x in params.items()}
    back = case.weights.dump(params)
    for name, p in chosen.items():
        np.testing.assert_array_equal(back[name], p.detach().numpy())
    assert back.keys() == chosen.keys()

    theirs = case.torch_run(case.torch_model)
    real = real_tokens(case, theirs.shape[1])
    weight = np.random.default_rng(1).normal(size=theirs.shape).astype(np.float32)
    (theirs * torch.from_numpy(weight)).sum().backward()

    def objective(params, x, grid):
        out = merge(seen["graph"], params)(x, grid)
        flat = out.reshape(out.shape[0], -1, out.shape[-1])[:, real]
        return jnp.sum(flat * weight), flat

    run = jax.jit(jax.value_and_grad(objective, has_aux=True))
    (_, out), grads = run(params, case.x, case.grid)
    expected = theirs.detach().numpy()
    error = close_in_norm(np.asarray(out), expected, 1e-4)
    zero = {n: np.zeros(p.shape, np.float32) for n, p in chosen.items()}
    their_grads = case.weights.load(
        {n: zero[n] if p.grad is None else p.grad.numpy() for n, p in chosen.items()}
    )
    return float(error), worst_gradient(grads, their_grads)


def real_tokens(case, count):
    """Indices of the tokens that are no padding, in all rows one after another."""
    if case.grid is None:
        return np.arange(count)
    if case.connector is None and case.vision.pool != "none":  # one an image
        return np.flatnonzero(case.grid.prod(-1))
    rows = case.x.shape[1] // case.merge**2
    used = case.grid.prod(-1).sum(-1) // case.merge**2
    found = np.concatenate([b * rows + np.arange(n) for b, n in enumerate(used)])
    assert len(found) == count
    return found
