"""Worker: transformers' LLaVA in torch over prepared batches. Arguments: folder, case, mode.

``mode`` is eager or compile. SDPA attention and the fused AdamW: torch's fastest on a CPU.
"""

from __future__ import annotations

import os
import pathlib
import sys
import time

_START = time.perf_counter()

import numpy as np  # noqa: E402  # the import is timed
import torch  # noqa: E402
from transformers import LlavaForConditionalGeneration  # noqa: E402

from benchmarks.common import serve, timed  # noqa: E402


def main(folder: pathlib.Path, case: str, mode: str) -> None:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, fused=True)
    imported = time.perf_counter()
    batches = []
    with np.load(folder / f"{case}.npz") as stored:
        for i in range(int(stored["count"])):
            names = ("input_ids", "attention_mask", "labels", "pixel_values")
            batches.append({name: torch.from_numpy(stored[f"{name}{i}"]) for name in names})
    shapes = {batch["input_ids"].shape for batch in batches}
    forward = model
    if mode == "compile":
        forward = torch.compile(model, dynamic=True if len(shapes) > 1 else None)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = forward(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    compiling = time.perf_counter()
    loss = float(step(batches[0]))
    done = time.perf_counter()
    index = 0

    def run(count: int) -> list[list[float]]:
        nonlocal index
        seconds = []
        for _ in range(count):
            batch = batches[index % len(batches)]
            seconds.append(timed(lambda batch=batch: step(batch)))
            index += 1
        return seconds

    ready = {
        "loss": loss,
        "import_s": imported - _START,
        "compile_s": done - compiling,
        "first_step_s": done - _START,
    }
    serve(ready, run)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3])
