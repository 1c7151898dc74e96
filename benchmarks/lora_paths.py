"""Where a low-rank adapter is applied: to activations, or added to each layer's weight.

    python -m benchmarks.lora_paths

Compiles the gradient of the adapters both ways and reads FLOPs and temporary memory from the
program; nothing is run. XLA counts a scan's body once: one layer, forward and backward.
"""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import RESULTS, environment
from jaxvlm.config import DecoderConfig, LoraConfig, MeshConfig, ModelConfig
from jaxvlm.losses.next_token import NextToken
from jaxvlm.models import lora
from jaxvlm.nn.param import contract
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.spmd.model import build_model
from jaxvlm.train.grad_accum import PlainRunner, scales
from jaxvlm.types import Batch

TOKENS = 512
DECODER = DecoderConfig(
    vocab_size=1024, width=1024, depth=4, num_heads=8, num_kv_heads=8, head_dim=128,
    mlp_dim=2816, remat="full",
)  # fmt: skip


def added(self: lora.Adapted, x: jax.Array, num_in: int) -> jax.Array:
    """The other way: the sum of matrices, then one product."""
    w = self.w + self.scale * jnp.tensordot(self.a, self.b, 1)
    if self.magnitude is not None:
        length = jax.lax.stop_gradient(lora.column_norms(self.w, self.a, self.b, self.scale))
        w = w * (self.magnitude / length)
    return contract(x, w, num_in)


def measure(config: LoraConfig) -> dict[str, float]:
    """GFLOP and MiB of temporaries of one layer's step."""
    mesh = make_mesh(MeshConfig(data=1), jax.devices()[:1])
    model = build_model(ModelConfig(decoder=DECODER, lora=config), mesh)
    trained = {path: x for path, x in model.shapes.items() if lora.is_adapter(path)}
    frozen = {path: x for path, x in model.shapes.items() if path not in trained}
    row = np.ones((1, TOKENS), np.int32)
    positions = np.arange(TOKENS, dtype=np.int32)[None, None]
    batch = Batch(row, row.astype(np.float32), positions, row)

    def run(trained: dict, frozen: dict, batch: Batch) -> object:
        loss = NextToken()
        runner = PlainRunner(model.apply)
        return runner.loss_grad(trained, frozen, batch, loss, scales(loss, batch))

    program = jax.jit(run).lower(trained, frozen, batch).compile()
    flops = program.cost_analysis()["flops"]
    return {
        "gflop": round(flops / 1e9, 1),
        "temporary_mib": round(program.memory_analysis().temp_size_in_bytes / 2**20),
    }


def main() -> None:
    """Compile both ways, for LoRA and DoRA, and write the result."""
    where = environment() | {"command": "python -m benchmarks.lora_paths"}
    result = {"environment": where, "decoder": dataclasses.asdict(DECODER)}
    result |= {"tokens": TOKENS, "rank": 16}
    own = lora.Adapted.contract
    for dora in (False, True):
        config = LoraConfig(rank=16, targets=("decoder/*",), dora=dora)
        for name, way in (("activations", own), ("added", added)):
            lora.Adapted.contract = way
            result[f"{'dora' if dora else 'lora'}_{name}"] = measure(config)
    lora.Adapted.contract = own
    text = json.dumps(result, indent=2) + "\n"
    print(text, end="")
    (RESULTS / "lora_paths_cpu.json").write_text(text)


if __name__ == "__main__":
    main()
