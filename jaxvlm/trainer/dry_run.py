"""``jaxvlm train --dry_run``: one batch in readable form, and the memory of the compiled step."""

from __future__ import annotations

from typing import Any

from jaxvlm.cache.host_cache import open_host_cache
from jaxvlm.parallel.mesh import mesh_text
from jaxvlm.train import program_memory
from jaxvlm.trainer import embedding_run, memory_estimate
from jaxvlm.trainer.batch_preview import batch_preview
from jaxvlm.trainer.run import Run
from jaxvlm.types import Pairs


def dry_run(run: Run) -> dict[str, Any]:
    """Compile the step, print a batch with its loss mask and the memory; train nothing.

    Returns:
        ``steps`` of the run, ``memory`` of a device by part, and real ``tokens`` of the batch.
    """
    training = run.training
    local, meta = next(run.dataset.train(run.rows, 0))
    if isinstance(local, Pairs):
        lines = [
            *embedding_run.introduction(run, local),
            *embedding_run.example_lines(run.dataset, meta),
        ]
    else:
        lines = list(batch_preview(local, meta, run.dataset, run.tokenizer))
    for line in lines:
        print(line)
    print(f"mesh {', vision encoder on '.join(map(mesh_text, run.meshes))}")
    estimate = memory_estimate.estimate(run, local)
    print(estimate if isinstance(estimate, str) else estimate.line())
    if host := open_host_cache(run.cache_inputs, print):
        local = host.fill(local)
    memory = program_memory.memory(training.step.get(training.abstract, training.place(local)))
    for name, size in memory.items():
        print(f"memory on a device, {name}: {size / 2**20:.1f} MiB")
    rows = [local.query, local.document] if isinstance(local, Pairs) else [local]
    tokens = sum(int((x.segment > 0).sum()) for x in rows)
    return {"steps": run.steps, "memory": memory, "tokens": tokens}
